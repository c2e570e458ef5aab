"""``longleaf probe``: one subcommand a question."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from longleaf.options import FiniteRange
from longleaf.probes.baseline import Baseline, Expected
from longleaf.probes.commit import CommitPlan, CommitRun, measure
from longleaf.probes.conduct import OutFile, conduct, finish
from longleaf.probes.gpu import GpuPlan, GpuRun
from longleaf.probes.gpu import measure as measure_gpu
from longleaf.probes.lengths import CONTEXTS_HELP, Contexts
from longleaf.probes.line import CARDS
from longleaf.probes.progress import Progress
from longleaf.probes.step import StepPlan, StepRun
from longleaf.probes.step import measure as measure_steps
from longleaf.probes.target import Url, api_key_option, metrics_url_option, url_option
from longleaf.probes.texts import REFERENCE, TEXTS
from longleaf.probes.watch import watch_command

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])
_POSITIVE = FiniteRange(min=0, min_open=True)


def outputs(command: _Decorated) -> _Decorated:
    """The options of what a probe leaves behind."""
    for option in (
        click.option("--html", "html_file", type=OutFile(), help="Write a page with a plot there."),
        click.option("--json", "json_file", type=OutFile(), help="Write everything there."),
    ):
        command = option(command)
    return command


timeout_option = click.option(
    "--timeout", default=1800.0, show_default=True, type=_POSITIVE, help="Seconds for one answer."
)


@click.group("probe")
def probe_command() -> None:
    """Ask a running system one question; the exit code says pass (0) or fail (1)."""


probe_command.add_command(watch_command)


@probe_command.command("commit")
@url_option
@metrics_url_option
@click.option("--contexts", type=Contexts(), help=CONTEXTS_HELP)
@click.option(
    "--texts",
    default=",".join(TEXTS),
    show_default=True,
    help=f"Kinds of text; without {REFERENCE} there is nothing to compare with.",
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Seeds.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(2))
@click.option("--temperature", default=0.0, show_default=True, type=FiniteRange(0, 2))
@timeout_option
@click.option(
    "--baseline",
    type=Baseline(),
    help="JSON of a good run: what --textfile says is expected.",
)
@click.option("--textfile", type=OutFile(), help="Write metrics for Prometheus there.")
@api_key_option
@outputs
@click.pass_context
def commit_command(
    ctx: click.Context,
    url: str,
    metrics_url: str | None,
    contexts: tuple[int, ...] | None,
    texts: str,
    repeats: int,
    max_tokens: int,
    temperature: float,
    timeout: float,
    baseline: Expected | None,
    textfile: Path | None,
    api_key: str | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Does the text, the context or a fault decide commit_len?

    Streams completions of several texts at several contexts, one at a time, and reads commit_len
    from each answer. Ctrl-C keeps what there is.
    """
    kinds = tuple(dict.fromkeys(kind.strip() for kind in texts.split(",")))
    unknown = [kind for kind in kinds if kind not in TEXTS]
    if unknown:
        raise click.BadParameter(
            f"{', '.join(unknown)}: there are {', '.join(TEXTS)}", param_hint="--texts"
        )
    plan = CommitPlan(
        url,
        metrics_url or f"{url}/metrics",
        contexts,
        kinds,
        repeats,
        max_tokens,
        temperature,
        timeout,
        metrics_required=metrics_url is not None,
        api_key=api_key,
    )
    run = CommitRun(plan)
    ending = conduct(measure(run, Progress(sys.stderr)))
    kept = None if ending.interrupted else textfile
    finish(
        ctx,
        run,
        ending,
        json_file,
        html_file,
        (kept, lambda path: run.write_textfile(path, baseline or {})),
    )


@probe_command.command("step")
@url_option
@click.option("--against", type=Url(), help="Base URL of another engine, to compare with.")
@metrics_url_option
@click.option("--contexts", type=Contexts(), help=CONTEXTS_HELP)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--max-tokens", default=96, show_default=True, type=click.IntRange(2))
@click.option(
    "--kv-bytes-per-token",
    type=FiniteRange(min=0, min_open=True),
    help="KV bytes of a token on one GPU, all layers.  [by the engine's metrics]",
)
@click.option("--card", type=click.Choice(sorted(CARDS)), help="Card, for the floor.")
@click.option(
    "--peak-bytes-per-second",
    type=FiniteRange(min=0, min_open=True),
    help="Its memory's peak, for another card.",
)
@click.option("--max-ratio", type=_POSITIVE, help="Fail where context costs more, in floors.")
@timeout_option
@api_key_option
@outputs
@click.pass_context
def step_command(
    ctx: click.Context,
    url: str,
    against: str | None,
    metrics_url: str | None,
    contexts: tuple[int, ...] | None,
    repeats: int,
    max_tokens: int,
    kv_bytes_per_token: float | None,
    card: str | None,
    peak_bytes_per_second: float | None,
    max_ratio: float | None,
    timeout: float,
    api_key: str | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """What does a step cost at which context, and what could it cost on this card?

    Fails where a context could not be measured or is more than half off the fitted line, where
    --max-ratio is passed, and where the engine is slower than the other one at any context. Ctrl-C
    keeps what there is.
    """
    urls = (url,) if against is None else (url, against)
    if card is not None and peak_bytes_per_second is not None:
        raise click.UsageError("--card and --peak-bytes-per-second exclude each other")
    peak = peak_bytes_per_second or (CARDS[card] if card is not None else None)
    if max_ratio is not None and peak is None:
        raise click.UsageError("--max-ratio needs --card or --peak-bytes-per-second")
    plan = StepPlan(
        urls,
        (metrics_url or f"{url}/metrics", f"{against}/metrics")[: len(urls)],
        contexts,
        repeats,
        max_tokens,
        kv_bytes_per_token,
        peak,
        max_ratio,
        timeout,
        metrics_required=metrics_url is not None,
        api_key=api_key,
    )
    run = StepRun(plan)
    ending = conduct(measure_steps(run, Progress(sys.stderr)))
    finish(ctx, run, ending, json_file, html_file)


@probe_command.command("gpu")
@url_option
@click.option(
    "--gpu-metrics-url",
    type=Url(),
    default="http://127.0.0.1:9400/metrics",
    show_default=True,
    help="/metrics of longleaf exporter gpu, on the engine's machine.",
)
@click.option(
    "--context",
    "contexts",
    type=Contexts(),
    help="Prompt tokens, about.  [default: 16k, or what the server takes]",
)
@click.option(
    "--seconds", default=10.0, show_default=True, type=_POSITIVE, help="Of each phase, at least."
)
@click.option(
    "--settle",
    default=1.0,
    show_default=True,
    type=FiniteRange(min=0),
    help="Left out at a phase's beginning.",
)
@click.option(
    "--interval",
    default=0.5,
    show_default=True,
    type=FiniteRange(min=0.1),
    help="Seconds between samples.",
)
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(2))
@api_key_option
@outputs
@click.pass_context
def gpu_command(
    ctx: click.Context,
    url: str,
    gpu_metrics_url: str,
    contexts: tuple[int, ...] | None,
    seconds: float,
    settle: float,
    interval: float,
    max_tokens: int,
    api_key: str | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Is prefill, is decode bound by compute, by memory or by latency?

    Samples the GPU exporter while nothing runs, while prompts are read and while an answer is
    written; judges each GPU. Fails where one at work is bound by latency or cannot be told, and
    where none works. Ctrl-C keeps what there is.
    """
    if contexts is not None and len(contexts) > 1:
        raise click.BadParameter("one length, please", param_hint="--context")
    context = None if contexts is None else contexts[0]
    plan = GpuPlan(
        url, gpu_metrics_url, context, seconds, settle, interval, max_tokens, api_key=api_key
    )
    run = GpuRun(plan)
    ending = conduct(measure_gpu(run, Progress(sys.stderr)))
    finish(ctx, run, ending, json_file, html_file)
