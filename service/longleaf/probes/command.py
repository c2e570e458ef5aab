"""``longleaf probe``: one subcommand a question."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from longleaf.probes.client import ProbeError
from longleaf.probes.commit import CommitPlan, CommitRun, expected_of, failed_cells, measure
from longleaf.probes.gpu import GpuPlan, GpuRun
from longleaf.probes.gpu import measure as measure_gpu
from longleaf.probes.lengths import Contexts
from longleaf.probes.line import CARDS
from longleaf.probes.progress import Progress
from longleaf.probes.report import lines, write_json, write_page
from longleaf.probes.step import StepPlan, StepRun
from longleaf.probes.step import measure as measure_steps
from longleaf.probes.texts import TEXTS
from longleaf.probes.watch import watch_command

_FAILED, _INTERRUPTED = 1, 130
_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])
_FILE = click.Path(dir_okay=False, path_type=Path)


def outputs(command: _Decorated) -> _Decorated:
    """The options of what a probe leaves behind."""
    for option in (
        click.option("--html", "html_file", type=_FILE, help="Write a page with a plot there."),
        click.option("--json", "json_file", type=_FILE, help="Write everything there."),
    ):
        command = option(command)
    return command


def run_to_end(work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work``; false if Ctrl-C ended it. ``ClickException`` if there is no server."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        return False
    except ProbeError as error:
        raise click.ClickException(str(error)) from error
    return True


def write_outputs(
    run: CommitRun | StepRun | GpuRun, json_file: Path | None, html_file: Path | None
) -> None:
    """Write what the options of ``outputs`` ask for."""
    if json_file is not None:
        write_json(json_file, run.document())
    if html_file is not None:
        write_page(html_file, run.page())


def tell(
    ctx: click.Context,
    run: StepRun | GpuRun,
    ended: bool,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Print a run's table and words, write it, and leave with the exit code that says it."""
    click.echo(lines(run.table()))
    click.echo(run.words() + ("" if ended else " Interrupted."))
    write_outputs(run, json_file, html_file)
    ctx.exit(_INTERRUPTED if not ended else _FAILED if run.faults() else 0)


@click.group("probe")
def probe_command() -> None:
    """Ask a running system one question; the exit code says pass (0) or fail (1)."""


probe_command.add_command(watch_command)


@probe_command.command("commit")
@click.option("--url", required=True, help="Base URL of the gateway or an engine.")
@click.option(
    "--metrics-url", help="Engine's /metrics, to check the figures against.  [default: URL/metrics]"
)
@click.option(
    "--contexts", default="1k,16k,64k", show_default=True, type=Contexts(), help="Prompt tokens."
)
@click.option(
    "--texts",
    default=",".join(TEXTS),
    show_default=True,
    help="Kinds of text; the first is the one that must go well.",
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Seeds.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(2))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0, 2))
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds for one answer.")
@click.option(
    "--baseline",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON of a good run: what --textfile says is expected.",
)
@click.option("--textfile", type=_FILE, help="Write metrics for Prometheus there.")
@outputs
@click.pass_context
def commit_command(
    ctx: click.Context,
    url: str,
    metrics_url: str | None,
    contexts: tuple[int, ...],
    texts: str,
    repeats: int,
    max_tokens: int,
    temperature: float,
    timeout: float,
    baseline: Path | None,
    textfile: Path | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Does the text, the context or a fault decide commit_len?

    Streams completions of several texts at several contexts, one at a time, and reads commit_len
    from each answer. Ctrl-C keeps what there is.
    """
    kinds = tuple(kind.strip() for kind in texts.split(","))
    unknown = [kind for kind in kinds if kind not in TEXTS]
    if unknown:
        raise click.BadParameter(
            f"{', '.join(unknown)}: there are {', '.join(TEXTS)}", param_hint="--texts"
        )
    base = url.rstrip("/")
    plan = CommitPlan(
        base,
        metrics_url or f"{base}/metrics",
        contexts,
        kinds,
        repeats,
        max_tokens,
        temperature,
        timeout,
    )
    run = CommitRun.of(plan)
    ended = run_to_end(measure(run, Progress(sys.stderr)))
    said = run.judgement()
    click.echo(lines(run.table()))
    if run.totals.metrics is None:
        click.echo(f"not checked against the engine's metrics: none at {plan.metrics_url}")
    cause = f" ({said.cause})" if said.cause else ""
    click.echo(f"{said.verdict}{cause}: {said.words}" + ("" if ended else " Interrupted."))
    write_outputs(run, json_file, html_file)
    if textfile is not None and ended:
        expected = {} if baseline is None else expected_of(json.loads(baseline.read_text()))
        run.write_textfile(textfile, expected)
    if not ended:
        ctx.exit(_INTERRUPTED)
    if not any(cell.samples for cell in run.cells):
        raise click.ClickException("; ".join(failed_cells(run.cells)[:3]))
    ctx.exit(0 if said.verdict.passed else _FAILED)


@probe_command.command("step")
@click.option("--url", required=True, help="Base URL of an engine, or the gateway of one.")
@click.option("--against", help="Base URL of another engine, to compare with.")
@click.option("--metrics-url", help="The first engine's /metrics.  [default: URL/metrics]")
@click.option(
    "--contexts", default="1k,16k,64k", show_default=True, type=Contexts(), help="Prompt tokens."
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--max-tokens", default=96, show_default=True, type=click.IntRange(2))
@click.option(
    "--kv-bytes-per-token",
    type=click.FloatRange(min=0, min_open=True),
    help="KV bytes of a token on one GPU, all layers.  [by the engine's metrics]",
)
@click.option("--card", type=click.Choice(sorted(CARDS)), help="Card, for the floor.")
@click.option(
    "--peak-bytes-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="Its memory's peak, for another card.",
)
@click.option("--max-ratio", type=float, help="Fail where context costs more, in floors.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds for one answer.")
@outputs
@click.pass_context
def step_command(
    ctx: click.Context,
    url: str,
    against: str | None,
    metrics_url: str | None,
    contexts: tuple[int, ...],
    repeats: int,
    max_tokens: int,
    kv_bytes_per_token: float | None,
    card: str | None,
    peak_bytes_per_second: float | None,
    max_ratio: float | None,
    timeout: float,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """What does a step cost at which context, and what could it cost on this card?

    Fails where a context is more than half off the fitted line, where --max-ratio is passed, and
    where the engine is slower than the other one at any context. Ctrl-C keeps what there is.
    """
    urls = tuple(base.rstrip("/") for base in (url, against) if base is not None)
    peak = peak_bytes_per_second or (CARDS[card] if card is not None else None)
    plan = StepPlan(
        urls,
        tuple(
            metrics_url or f"{base}/metrics" if base == urls[0] else f"{base}/metrics"
            for base in urls
        ),
        contexts,
        repeats,
        max_tokens,
        kv_bytes_per_token,
        peak,
        max_ratio,
        timeout,
    )
    run = StepRun(plan)
    ended = run_to_end(measure_steps(run, Progress(sys.stderr)))
    tell(ctx, run, ended, json_file, html_file)


@probe_command.command("gpu")
@click.option("--url", required=True, help="Base URL of the gateway or an engine.")
@click.option(
    "--gpu-metrics-url",
    default="http://127.0.0.1:9400/metrics",
    show_default=True,
    help="/metrics of longleaf exporter gpu, on the engine's machine.",
)
@click.option(
    "--context",
    "contexts",
    default="16k",
    show_default=True,
    type=Contexts(),
    help="Prompt tokens, about.",
)
@click.option("--seconds", default=10.0, show_default=True, help="Of each phase, at least.")
@click.option("--settle", default=1.0, show_default=True, help="Left out at a phase's beginning.")
@click.option(
    "--interval",
    default=0.5,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds between samples.",
)
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(2))
@outputs
@click.pass_context
def gpu_command(
    ctx: click.Context,
    url: str,
    gpu_metrics_url: str,
    contexts: tuple[int, ...],
    seconds: float,
    settle: float,
    interval: float,
    max_tokens: int,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Is prefill, is decode bound by compute, by memory or by latency?

    Samples the GPU exporter while nothing runs, while prompts are read and while an answer is
    written. Fails where it is latency, or cannot be told. Ctrl-C keeps what there is.
    """
    base = url.rstrip("/")
    plan = GpuPlan(base, gpu_metrics_url, contexts[-1], seconds, settle, interval, max_tokens)
    run = GpuRun(plan)
    ended = run_to_end(measure_gpu(run, Progress(sys.stderr)))
    tell(ctx, run, ended, json_file, html_file)
