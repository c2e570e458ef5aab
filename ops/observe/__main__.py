"""``make observe``: the service on this machine, Prometheus (and Alertmanager) watching it."""

import asyncio
import contextlib
import signal
import sys
import tempfile
from pathlib import Path

import click

from longleaf.serve.command import MODEL_NAME
from ops.observe.load import Load, run_until
from ops.observe.prometheus import (
    Target,
    configuration,
    running_alertmanager,
    running_gpu_exporter,
    running_prometheus,
)
from ops.observe.replay import replaying

RECORDING = Path(__file__).parent / "recordings" / "h200" / "longleaf-verify-64k.json"
_PORT = click.IntRange(1, 65_535)


async def _serve(port: int, metrics_port: int, engine_port: int, *, load: bool) -> int:
    """Run ``longleaf serve``, under load once it is ready; ends with it, or at Ctrl-C."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "longleaf", "serve", "--port", str(port)),
        *("--metrics-port", str(metrics_port), "--engine-port", str(engine_port)),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    ended = asyncio.create_task(process.wait())
    line = asyncio.create_task(process.stdout.readline())
    await asyncio.wait({stopped, ended, line}, return_when=asyncio.FIRST_COMPLETED)
    if line.done():
        click.echo(line.result().decode(), nl=False)
    if load and not stop.is_set():
        requests = Load(f"http://127.0.0.1:{port}", MODEL_NAME, width=2)
        ended.add_done_callback(lambda _: stop.set())
        await run_until(requests, stop)
    await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    return await ended


@click.command()
@click.option("--port", default=8080, show_default=True, type=_PORT, help="Public API.")
@click.option("--metrics-port", default=9080, show_default=True, type=_PORT, help="Gateway.")
@click.option("--engine-port", default=30000, show_default=True, type=_PORT, help="Engine.")
@click.option("--prometheus-port", default=9090, show_default=True, type=_PORT)
@click.option("--alertmanager-port", default=9093, show_default=True, type=_PORT)
@click.option("--gpu-port", default=9400, show_default=True, type=_PORT, help="GPU recording.")
@click.option("--interval", default="5s", show_default=True, help="Of scrapes and rules.")
@click.option(
    "--gpu-exporter", metavar="HOST:PORT", help="A GPU exporter to scrape.  [an H200's recording]"
)
@click.option(
    "--textfile",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that a probe writes (--textfile), to scrape too; repeat.",
)
@click.option("--load/--no-load", default=False, show_default=True, help="Send requests too.")
def main(
    port: int,
    metrics_port: int,
    engine_port: int,
    prometheus_port: int,
    alertmanager_port: int,
    gpu_port: int,
    interval: str,
    gpu_exporter: str | None,
    textfile: tuple[Path, ...],
    load: bool,
) -> None:
    """Run the service with Prometheus and Alertmanager beside it, until Ctrl-C."""
    targets = [
        Target("longleaf-gateway", f"127.0.0.1:{metrics_port}"),
        Target("longleaf-engine", f"127.0.0.1:{engine_port}"),
    ]
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longleaf-")))
        if gpu_exporter is None:
            gpu_exporter = stack.enter_context(
                running_gpu_exporter(directory, port=gpu_port, recording=RECORDING)
            )
            click.echo("GPU metrics: the recording of an H200 (--gpu-exporter names a real one)")
        targets.append(Target("longleaf-gpu", gpu_exporter))
        if textfile:
            targets.append(
                Target("longleaf-probe", f"127.0.0.1:{stack.enter_context(replaying(*textfile))}")
            )
        try:
            alerts = stack.enter_context(running_alertmanager(directory, port=alertmanager_port))
            click.echo(f"alertmanager  http://{alerts}")
        except FileNotFoundError as error:
            click.echo(f"without Alertmanager: {error}", err=True)
            alerts = None
        config = configuration(targets, interval=interval, namespace="local", alertmanager=alerts)
        try:
            prometheus = stack.enter_context(
                running_prometheus(directory, config, port=prometheus_port)
            )
        except FileNotFoundError as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"prometheus    {prometheus.url}")
        click.echo(f"status page   http://127.0.0.1:{metrics_port}/ui, once the service is ready")
        sys.exit(asyncio.run(_serve(port, metrics_port, engine_port, load=load)))


if __name__ == "__main__":
    main()
