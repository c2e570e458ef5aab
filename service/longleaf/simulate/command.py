"""``longleaf simulate``: stand-in replicas with the times of a recorded curve."""

from pathlib import Path

import click

from longleaf.embedded.fields import ConfigError
from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.options import SchedulerOptions
from longleaf.simulate.commits import DEFAULT_COMMITS, CommitsError, load_commits
from longleaf.simulate.curve import CURVES, CurveError, load_curve

_CURVES = ", ".join(sorted(path.stem for path in CURVES.glob("*.json")))


@click.command("simulate")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=30000, show_default=True, type=click.IntRange(1, 65535), help="First port."
)
@click.option(
    "--replicas",
    default=1,
    show_default=True,
    type=click.IntRange(1, 1024),
    help="Replicas, a port each.",
)
@click.option(
    "--curve",
    default="h200-ddtree",
    show_default=True,
    help=f"Recorded curve: a file, or one of {_CURVES}.",
)
@click.option(
    "--commit-len",
    type=click.Path(path_type=Path),
    default=DEFAULT_COMMITS,
    help="Distributions of commit_len by kind of text (default: the tiny models').",
)
@click.option(
    "--text", default="prose", show_default=True, help="Kind of a request without metadata.text."
)
@click.option(
    "--speed",
    default=1.0,
    show_default=True,
    type=click.FloatRange(1e-3, 1e3),
    help="Seconds of the curve that pass in one second.",
)
@click.option(
    "--answer-tokens",
    default=256.0,
    show_default=True,
    type=click.FloatRange(1.0),
    help="Mean length of answers without max_tokens.",
)
@click.option("--context-length", default=200_000, show_default=True, help="Longest context.")
@click.option("--max-total-tokens", default=218_000, show_default=True, help="Slots of a KV pool.")
@click.option(
    "--max-running-requests", default=8, show_default=True, help="Answers decoded together."
)
@click.option(
    "--max-queued-requests", type=int, default=None, help="Waiting requests at most [no limit]."
)
@click.option(
    "--chunked-prefill-size", default=8192, show_default=True, help="Prompt tokens of one forward."
)
@click.option(
    "--prefill-first/--interleave-prefill",
    default=True,
    show_default=True,
    help="No decode step while a prompt is prefilled (SGLang), or one after each chunk.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    default=DEFAULT_MODELS / "tiny-target",
    help="Directory with tokenizer and chat template (default: the tiny model's).",
)
@click.option("--served-model-name", default="longleaf-simulated", show_default=True, help="Model.")
@click.option("--max-body-bytes", default=64 << 20, show_default=True, help="Largest request body.")
@click.option(
    "--drain-seconds", default=60.0, show_default=True, help="Longest drain after SIGTERM."
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="How much the server logs.",
)
def simulate_command(
    host: str,
    port: int,
    replicas: int,
    curve: str,
    commit_len: Path,
    text: str,
    speed: float,
    answer_tokens: float,
    context_length: int,
    max_total_tokens: int,
    max_running_requests: int,
    max_queued_requests: int | None,
    chunked_prefill_size: int,
    prefill_first: bool,
    tokenizer: Path,
    served_model_name: str,
    max_body_bytes: int,
    drain_seconds: float,
    log_level: str,
) -> None:
    """Serve replicas that compute nothing: SGLang's HTTP surface, scheduler, KV pool and queue,
    with step and prefill times from a recorded curve.

    Every answer says so: a header x-longleaf-simulated, system_fingerprint, a label of every
    metric, and the text itself. A request may name its kind of text: "metadata": {"text": "code"}.
    """
    from longleaf.embedded.server.service import ServerOptions
    from longleaf.embedded.tokenizer import Tokenizer
    from longleaf.simulate.executor import Pace
    from longleaf.simulate.server import Simulation, serve_simulation

    if port + replicas - 1 > 65_535:
        raise click.BadParameter(
            f"{replicas} ports from {port} on go beyond 65535", param_hint="--replicas"
        )
    try:
        commits = load_commits(commit_len)
        if text not in commits.kinds:
            raise click.BadParameter(
                f"{text!r} is none of {', '.join(commits.kinds)}", param_hint="--text"
            )
        simulation = Simulation(
            curve=load_curve(curve),
            commits=commits,
            pace=Pace(speed, text, answer_tokens),
            tokenizer_path=tokenizer,
            tokenizer=Tokenizer.load(tokenizer),
            limits=SchedulerOptions(
                context_length=context_length,
                max_total_tokens=max_total_tokens,
                max_running_requests=max_running_requests,
                max_queued_requests=max_queued_requests,
                chunked_prefill_size=chunked_prefill_size,
                prefill_first=prefill_first,
            ),
            served_model_name=served_model_name,
        )
    except (CurveError, CommitsError, ConfigError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    server = ServerOptions(host, port, max_body_bytes, drain_seconds)
    last = port + replicas - 1
    ports = f"{port}" if replicas == 1 else f"{port} to {last}"
    click.echo(f"{simulation.fingerprint}: {replicas} simulated on {host}, port {ports}", err=True)
    try:
        serve_simulation(simulation, host, range(port, port + replicas), server, log_level)
    except OSError as error:
        raise click.ClickException(str(error)) from error
