"""``longleaf serve``: start both parts, wait until ready, drain both on Ctrl-C."""

import asyncio
import contextlib
import json
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import click

from longleaf import embedded
from longleaf.gateway.config import RoutingPolicyName
from longleaf.gateway.replicas.client import ReplicaClient, ReplicaError
from longleaf.serve.children import Child, start_child

MODEL_NAME = "longleaf-tiny"
_END_SECONDS = 15.0
"""What a part gets on top of its drain limit to end the answers that are left, with an error."""
_ASK_SECONDS = 2.0
_PORT = click.IntRange(1, 65535)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where the parts listen, and how long they may take (seconds) to start and to drain."""

    host: str
    port: int
    metrics_port: int
    engine_port: int
    start_seconds: float
    drain_seconds: float
    engine_args: tuple[str, ...]
    gateway_args: tuple[str, ...] = ()
    keys: bool = False
    """Whether requests need an API key."""
    replicas: int = 1
    """Behind the gateway, the engine among them."""

    @property
    def gateway_url(self) -> str:
        """Base URL of the public API."""
        return f"http://{self.host}:{self.port}"

    @property
    def engine_url(self) -> str:
        """Base URL of the engine; only the gateway calls it."""
        return f"http://127.0.0.1:{self.engine_port}"


def check_ports(config: ServeConfig) -> None:
    """Raise ``click.ClickException`` naming the first port that is taken."""
    wanted = {
        "--port": (config.host, config.port),
        "--metrics-port": (config.host, config.metrics_port),
        "--engine-port": ("127.0.0.1", config.engine_port),
    }
    if len({port for _, port in wanted.values()}) < len(wanted):
        raise click.ClickException(
            f"--port {config.port}, --metrics-port {config.metrics_port} and --engine-port "
            f"{config.engine_port} must differ"
        )
    for option, (host, port) in wanted.items():
        try:
            with socket.create_server((host, port)):
                pass
        except OSError as error:
            raise click.ClickException(
                f"{option}: cannot listen on {host}:{port} ({error.strerror}); choose another port"
            ) from error


def ready_line(config: ServeConfig, model: str, seconds: float) -> str:
    """The line that tells a user what to paste."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count from 1 to 40."}],
        "temperature": 0,
        "max_tokens": 160,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_spec_tokens_details": True,
    }
    key = "-H 'Authorization: Bearer KEY' " if config.keys else ""
    return (
        f"ready after {seconds:.1f} s; try: curl -N {config.gateway_url}/v1/chat/completions {key}"
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )


async def _wait_ready(
    config: ServeConfig, gateway: ReplicaClient, engine: ReplicaClient, children: list[Child]
) -> str:
    """Wait until all replicas are ready; returns the name of the model that the engine serves."""
    found = 0
    deadline = time.monotonic() + config.start_seconds
    while True:
        for child in children:
            if child.process.returncode is not None:
                raise click.ClickException(
                    f"the {child.name} ended with status {child.process.returncode} while starting"
                )
        with contextlib.suppress(ReplicaError):
            live = await gateway.fetch_json("GET", "/livez", _ASK_SECONDS)
            found = live["ready_replicas"]
            if found >= config.replicas:
                models = await engine.fetch_json("GET", "/v1/models", _ASK_SECONDS)
                return str(models["data"][0]["id"])
        if time.monotonic() > deadline:
            raise click.ClickException(
                f"{found} of {config.replicas} replicas ready after {config.start_seconds:.0f} s "
                "(--start-seconds)"
            )
        await asyncio.sleep(0.1)


def _engine_arguments(config: ServeConfig) -> tuple[str, ...]:
    return (
        *("embedded", "--host", "127.0.0.1", "--port", str(config.engine_port)),
        *("--served-model-name", MODEL_NAME, "--drain-seconds", str(config.drain_seconds)),
        *config.engine_args,
    )


def model_path(engine_args: tuple[str, ...]) -> str:
    """Directory of the checkpoint that the engine serves: its tokenizer is the gateway's too."""
    default = str(Path(embedded.__file__).parent / "models" / "tiny-target")
    return _option(engine_args, "--model-path") or default


def model_name(engine_args: tuple[str, ...]) -> str:
    """Name that the engine serves its model by."""
    return _option(engine_args, "--served-model-name") or MODEL_NAME


def _option(arguments: tuple[str, ...], name: str) -> str | None:
    """The value of an option in a command line: of several the last."""
    found = None
    for number, argument in enumerate(arguments):
        given, equals, value = argument.partition("=")
        if given == name:
            found = value if equals else "".join(arguments[number + 1 : number + 2])
    return found


def _gateway_arguments(config: ServeConfig) -> tuple[str, ...]:
    return (
        *("gateway", "--host", config.host, "--port", str(config.port)),
        *("--metrics-port", str(config.metrics_port), "--replica", config.engine_url),
        *("--drain-timeout", str(config.drain_seconds)),
        *("--tokenizer", f"{model_name(config.engine_args)}={model_path(config.engine_args)}"),
        *config.gateway_args,
    )


def _kill_all(children: list[Child]) -> None:
    for child in children:
        child.kill()


async def serve(config: ServeConfig) -> int:
    """Run both parts until a signal comes or one of them ends; returns the exit status."""
    check_ports(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    begin = time.monotonic()
    children: list[Child] = []
    status = 0
    try:
        children.append(await start_child("embedded engine", _engine_arguments(config)))
        children.append(await start_child("gateway", _gateway_arguments(config)))
        stopped = asyncio.create_task(stop.wait())
        gateway = ReplicaClient(config.gateway_url, _ASK_SECONDS, None)
        engine = ReplicaClient(config.engine_url, _ASK_SECONDS, None)
        ready = asyncio.create_task(_wait_ready(config, gateway, engine, children))
        await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            click.echo(ready_line(config, ready.result(), time.monotonic() - begin))
        else:
            ready.cancel()
        await gateway.close()
        await engine.close()
        ends = {asyncio.create_task(child.process.wait()): child for child in children}
        done, _ = await asyncio.wait({stopped, *ends}, return_when=asyncio.FIRST_COMPLETED)
        for task in done & set(ends):
            click.echo(f"the {ends[task].name} ended with status {task.result()}", err=True)
            status = 1
        if stopped.done():
            click.echo("draining; Ctrl-C again to stop at once", err=True)
            loop.add_signal_handler(signal.SIGINT, _kill_all, children)
    finally:
        for child in reversed(children):
            await child.stop(config.drain_seconds + _END_SECONDS)
    return status


@click.command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the public API.")
@click.option("--port", default=8080, show_default=True, type=_PORT, help="Port of the public API.")
@click.option(
    "--metrics-port", default=9080, show_default=True, type=_PORT, help="Gateway metrics."
)
@click.option(
    "--engine-port", default=30000, show_default=True, type=_PORT, help="Engine (loopback)."
)
@click.option(
    "--start-seconds", default=120.0, show_default=True, help="Give up starting after this."
)
@click.option(
    "--drain-seconds", default=60.0, show_default=True, help="Longest drain of each part."
)
@click.option(
    "--api-key-file",
    envvar="LONGLEAF_GATEWAY_API_KEY_FILE",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    help="File of accepted API keys and their limits.  [default: open to all]",
)
@click.option(
    "--routing",
    type=click.Choice(get_args(RoutingPolicyName)),
    help="How the gateway chooses a replica.  [default: expected_cost]",
)
@click.option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="URL",
    help="One more replica for the gateway, beside the engine; repeat.",
)
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def serve_command(
    ctx: click.Context,
    host: str,
    port: int,
    metrics_port: int,
    engine_port: int,
    start_seconds: float,
    drain_seconds: float,
    api_key_file: Path | None,
    routing: str | None,
    replicas: tuple[str, ...],
    engine_args: tuple[str, ...],
) -> None:
    """Start the embedded engine and the gateway on this machine.

    Arguments after -- go to `longleaf embedded`. Whatever else `longleaf gateway --help` lists can
    be set in the environment, as LONGLEAF_GATEWAY_<NAME>.
    """
    gateway_args = [part for url in replicas for part in ("--replica", url)]
    if api_key_file is not None:
        gateway_args += ["--api-key-file", str(api_key_file)]
    if routing is not None:
        gateway_args += ["--routing", routing]
    config = ServeConfig(
        host,
        port,
        metrics_port,
        engine_port,
        start_seconds,
        drain_seconds,
        engine_args,
        tuple(gateway_args),
        api_key_file is not None,
        1 + len(replicas),
    )
    ctx.exit(asyncio.run(serve(config)))
