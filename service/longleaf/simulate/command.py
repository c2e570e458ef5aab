"""``longleaf simulate``: stand-in replicas with the times of a recorded curve."""

from pathlib import Path

import click

from longleaf.embedded.arguments import ServerArguments, server_options
from longleaf.embedded.fields import ConfigError
from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.options import SchedulerOptions
from longleaf.options import FiniteRange
from longleaf.simulate.commits import DEFAULT_COMMITS, CommitsError, load_commits
from longleaf.simulate.curve import CURVES, CurveError, load_curve

_CURVES = ", ".join(sorted(path.stem for path in CURVES.glob("*.json")))


@click.command("simulate")
@server_options(
    served_model_name="longleaf-simulated",
    context_length=200_000,
    max_total_tokens=218_000,
    chunked_prefill_size=8192,
)
@click.option(
    "--replicas",
    default=1,
    show_default=True,
    type=click.IntRange(1, 1024),
    help="Replicas, a port each from --port on.",
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
    "--text",
    default="prose",
    show_default=True,
    help="Kind of a request whose metadata.text is missing or none of the file's.",
)
@click.option(
    "--speed",
    default=1.0,
    show_default=True,
    type=FiniteRange(1e-3, 1e3),
    help="Seconds of the curve that pass in one second.",
)
@click.option(
    "--answer-tokens",
    default=256.0,
    show_default=True,
    type=FiniteRange(1.0),
    help="Mean length of answers without max_tokens.",
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
def simulate_command(
    server: ServerArguments,
    replicas: int,
    curve: str,
    commit_len: Path,
    text: str,
    speed: float,
    answer_tokens: float,
    prefill_first: bool,
    tokenizer: Path,
) -> None:
    """Serve replicas that compute nothing: SGLang's HTTP surface, scheduler, KV pool and queue,
    with step and prefill times from a recorded curve.

    Every answer says so: a header x-longleaf-simulated, system_fingerprint, a label of every
    metric, and the text itself. A request may name its kind of text: "metadata": {"text": "code"}.
    Metadata is the client's own, as with any engine: a kind that --commit-len lacks is no error,
    the request counts as --text.
    """
    from longleaf.embedded.server.service import ServerOptions
    from longleaf.embedded.tokenizer import Tokenizer
    from longleaf.simulate.executor import Pace
    from longleaf.simulate.server import Simulation, serve_simulation

    last = server.port + replicas - 1
    if last > 65_535:
        raise click.BadParameter(
            f"{replicas} ports from {server.port} on go beyond 65535", param_hint="--replicas"
        )
    assert server.context_length is not None
    assert server.served_model_name is not None
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
                context_length=server.context_length,
                max_total_tokens=server.max_total_tokens,
                max_running_requests=server.max_running_requests,
                max_queued_requests=server.max_queued_requests,
                chunked_prefill_size=server.chunked_prefill_size,
                prefill_first=prefill_first,
            ),
            served_model_name=server.served_model_name,
        )
    except (CurveError, CommitsError, ConfigError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    surface = ServerOptions(server.host, server.port, server.max_body_bytes, server.drain_seconds)
    ports = range(server.port, last + 1)
    where = f"{server.port}" if replicas == 1 else f"{server.port} to {last}"
    click.echo(
        f"{simulation.fingerprint}: {replicas} simulated on {server.host}, port {where}", err=True
    )
    limits = simulation.limits
    for told in simulation.curve.beyond(limits.max_running_requests, limits.context_length):
        click.echo(told, err=True)
    try:
        serve_simulation(simulation, server.host, ports, surface, server.log_level)
    except OSError as error:
        raise click.ClickException(str(error)) from error
