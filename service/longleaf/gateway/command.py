"""``longleaf gateway``."""

import contextlib
import logging
import resource
import sys
from pathlib import Path
from typing import get_args

import click
import uvloop
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from longleaf.gateway.config import GatewayConfig, RoutingPolicyName
from longleaf.gateway.request_log import JsonFormatter, LineHandler
from longleaf.gateway.server import GatewayServer, PortError

_FLAGS = {"replicas": "--replica", "tokenizers": "--tokenizer"}


def load_config(**flags: object) -> GatewayConfig:
    """The configuration: flags that were given, over the environment, over the defaults.

    ``click.ClickException`` lists every wrong value with its flag.
    """
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    try:
        return GatewayConfig(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            name = str(problem["loc"][0]) if problem["loc"] else ""
            flag = _FLAGS.get(name, "--" + name.replace("_", "-")) if name else ""
            message = problem["msg"].removeprefix("Value error, ")
            own = problem["type"] == "value_error" or name in {"", "upstream_api_key"}
            value = "" if own else f" (got {problem['input']!r})"
            lines.append(f"{flag}: {message}{value}" if flag else message)
        raise click.ClickException("; ".join(lines)) from None


def configure_logging(level: str) -> None:
    """JSON lines on standard error."""
    handler = LineHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # never shown
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def allow_many_sockets() -> None:
    """Raise the soft limit of open files to the hard one.

    A stream takes two sockets: at the usual soft limit of 1,024 the gateway could reach no replica
    from about 500 streams on, and would take that for the replicas' fault.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _run(config: GatewayConfig) -> None:
    await GatewayServer(config).run()


class _GatewayCommand(click.Command):
    """Lists at the end of its help the settings that have no flag."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        flags = {parameter.name for parameter in self.params}
        with formatter.section("By environment alone"):
            formatter.write_dl(
                [
                    (f"LONGLEAF_GATEWAY_{name.upper()}", _help(field))
                    for name, field in GatewayConfig.model_fields.items()
                    if name not in flags
                ]
            )


def _help(field: FieldInfo) -> str:
    text = " ".join((field.description or "").replace("``", "").split())
    return text if field.default is None else f"{text}  [default: {field.default}]"


@click.command("gateway", cls=_GatewayCommand)
@click.option(
    "--replica", "replicas", multiple=True, metavar="URL", help="Base URL of a replica; repeat."
)
@click.option(
    "--kubernetes-service",
    metavar="[NAMESPACE/]NAME",
    help="Find replicas as the endpoints of this Service.",
)
@click.option("--kubernetes-port", help="Number or name of their port.  [default: the first]")
@click.option(
    "--kubernetes-api", metavar="URL", help="API server.  [default: that of the cluster around]"
)
@click.option("--host", help="Address of the public API.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port of the public API.  [default: 8080]")
@click.option("--metrics-host", help="Address of /metrics and /ui.  [default: 127.0.0.1]")
@click.option("--metrics-port", type=int, help="Port of /metrics and /ui.  [default: 9080]")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="File of accepted API keys, one a line, plain or sha256:<hex>, with limits (such as "
    "requests_per_minute=60); read again when it changes. Without it: open to all.",
)
@click.option(
    "--tls-certificate-file", type=click.Path(path_type=Path), help="Certificate chain (PEM)."
)
@click.option("--tls-key-file", type=click.Path(path_type=Path), help="Its private key (PEM).")
@click.option(
    "--upstream-ca-file", type=click.Path(path_type=Path), help="CA of https replicas (PEM)."
)
@click.option("--otlp-endpoint", metavar="URL", help="Send traces there (OTLP over HTTP).")
@click.option("--upstream-api-key", help="Bearer key for the replicas (better: by environment).")
@click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    metavar="[MODEL=]PATH",
    help="Directory of a model's tokenizer files, to count prompts here; repeat.",
)
@click.option("--queue-size", type=int, help="Requests that may wait for room.  [default: 512]")
@click.option("--queue-timeout", type=float, help="Seconds they may wait.  [default: 30]")
@click.option(
    "--max-prefill-tokens",
    type=int,
    help="Prompt tokens in flight on one replica at most.  [default: 65536]",
)
@click.option(
    "--short-prompt-tokens",
    type=int,
    help="Prompts that may start beside a long one, and overtake it.  [default: 4096]",
)
@click.option("--tpot-ms", type=float, help="Predicted ms a token not to exceed.  [none]")
@click.option("--ttft-ms", type=float, help="Predicted ms to a first token likewise.  [none]")
@click.option("--max-body-bytes", type=int, help="Largest request body.  [default: 67108864]")
@click.option(
    "--body-timeout", type=float, help="Seconds between parts of a request body.  [default: 60]"
)
@click.option(
    "--routing",
    type=click.Choice(get_args(RoutingPolicyName)),
    help="Send a request where it costs least time (expected_cost), where most of it is cached "
    "(prefix), where the KV pool is emptiest (kv_pressure), or in turn.  [default: expected_cost]",
)
@click.option("--max-attempts", type=int, help="Replicas one request may try.  [default: 3]")
@click.option("--max-connections", type=int, help="Requests on one replica.  [default: 1024]")
@click.option("--connect-timeout", type=float, help="Seconds.  [default: 5]")
@click.option(
    "--first-byte-timeout", type=float, help="Seconds to the first event.  [default: 1800]"
)
@click.option("--idle-timeout", type=float, help="Seconds between chunks.  [default: 300]")
@click.option(
    "--hang-timeout",
    type=float,
    help="Seconds without a sign of life of a replica that requests wait for.  [default: 60]",
)
@click.option(
    "--silence-before-comment",
    type=float,
    help="Seconds after which a silent stream gets comment lines.  [default: 15]",
)
@click.option("--header-timeout", type=float, help="Seconds for a request's head.  [default: 10]")
@click.option(
    "--write-timeout", type=float, help="Seconds a client may read nothing.  [default: 60]"
)
@click.option("--health-interval", type=float, help="Seconds between checks.  [default: 5]")
@click.option("--health-timeout", type=float, help="Seconds, more than 1.  [default: 5]")
@click.option(
    "--drain-timeout", type=float, help="Seconds for running answers to end.  [default: 600]"
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Health requests are logged at debug.",
)
def gateway_command(log_level: str, **flags: object) -> None:
    """Serve the OpenAI API in front of one or more replicas.

    Every option can be set as LONGLEAF_GATEWAY_<NAME> too (LONGLEAF_GATEWAY_REPLICAS takes a list
    with commas); flags win.
    """
    config = load_config(**flags)
    configure_logging(log_level)
    allow_many_sockets()
    try:
        uvloop.run(_run(config))
    except (ValueError, OSError, PortError) as error:
        raise click.ClickException(str(error)) from error
