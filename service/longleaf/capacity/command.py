"""``longleaf capacity``: replicas, KV pool, tree budget, gateway pods and cost of a traffic."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from longleaf.capacity.check import Check, Checked, usual_requests
from longleaf.capacity.model import CapacityError, Model, Objective
from longleaf.capacity.pages import Answer, Prices, words
from longleaf.capacity.search import Found, search
from longleaf.capacity.traffic import Kind, TrafficError, load_kinds, normalized, parse_kind
from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.options import SchedulerOptions
from longleaf.embedded.tokenizer import Tokenizer
from longleaf.options import FiniteRange
from longleaf.simulate.commits import DEFAULT_COMMITS, CommitLengths, CommitsError, load_commits
from longleaf.simulate.curve import CurveError, load_curve


@click.command("capacity")
@click.option("--rate", required=True, type=FiniteRange(1e-6, 1e9), help="Requests a second.")
@click.option(
    "--mix",
    "mixes",
    multiple=True,
    metavar="SHARE:PROMPT[+CACHED]:ANSWER[:TEXT]",
    help="Kind of request, such as 0.1:185k+160k:256:code: of 185,000 tokens 163,840 are cached. "
    "k is 1,024 tokens, but 185k and 200k are round numbers. Repeat.",
)
@click.option("--mix-file", type=click.Path(path_type=Path), help="The same as a JSON list.")
@click.option(
    "--curve",
    "curves",
    multiple=True,
    default=("h200-ddtree", "h200-plain"),
    show_default=True,
    help="Recorded curve; of several, the one whose decode steps take least time a token decides "
    "the tree budget.",
)
@click.option(
    "--commit-len", type=click.Path(path_type=Path), default=DEFAULT_COMMITS, help="File."
)
@click.option("--ttft-ms", type=FiniteRange(0, min_open=True), help="Mean to the first token.")
@click.option(
    "--ttft-ms-per-1k",
    default=0.0,
    type=FiniteRange(0),
    help="Added to --ttft-ms for each 1,000 tokens of the prompt.",
)
@click.option("--tpot-ms", type=FiniteRange(0, min_open=True), help="Mean for each token.")
@click.option(
    "--utilization",
    default=0.9,
    show_default=True,
    type=FiniteRange(0, 1, min_open=True),
    help="Share of a replica's time to plan with.",
)
@click.option(
    "--max-total-tokens", default=218_000, show_default=True, help="KV pool of a replica."
)
@click.option("--max-running-requests", default=8, show_default=True, help="Its sequences.")
@click.option("--chunked-prefill-size", default=8192, show_default=True, help="For the simulation.")
@click.option(
    "--node-cost", default=0.0, type=FiniteRange(0), help="Cost of a replica's machine an hour."
)
@click.option(
    "--gateway-ms",
    default=4.5,
    show_default=True,
    type=FiniteRange(0),
    help="Gateway CPU of a request, in ms, without counting its tokens: as `make bench-load` "
    "measures it.",
)
@click.option(
    "--gateway-us-per-token",
    default=3.0,
    show_default=True,
    type=FiniteRange(0),
    help="Gateway CPU of counting one prompt token, in µs.",
)
@click.option(
    "--gateway-cores",
    default=1.0,
    show_default=True,
    type=FiniteRange(0, min_open=True),
    help="Cores of a gateway pod.",
)
@click.option(
    "--check-requests",
    default=None,
    type=click.IntRange(0, 1_000_000),
    help="Requests, at least, of the simulation that checks the answer (default: 1000, fewer where "
    "answers are long); 0 leaves it out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def capacity_command(
    rate: float,
    mixes: tuple[str, ...],
    mix_file: Path | None,
    curves: tuple[str, ...],
    commit_len: Path,
    ttft_ms: float | None,
    ttft_ms_per_1k: float,
    tpot_ms: float | None,
    utilization: float,
    max_total_tokens: int,
    max_running_requests: int,
    chunked_prefill_size: int,
    node_cost: float,
    gateway_ms: float,
    gateway_us_per_token: float,
    gateway_cores: float,
    check_requests: int | None,
    as_json: bool,
) -> None:
    """What a traffic needs within an objective, by formulas that are shown, checked by simulation.

    Times are means. The simulation is of the whole fleet behind one gateway, under all of the
    traffic; replicas are added while it misses the objective, and the answer says so. Each fleet's
    line comes on stderr once it is simulated. A time for which formulas and simulation are more
    than a third apart is marked "differs".
    """
    if ttft_ms_per_1k and ttft_ms is None:
        raise click.UsageError("--ttft-ms-per-1k is added to --ttft-ms, which is missing")
    try:
        kinds = normalized([*map(parse_kind, mixes), *(load_kinds(mix_file) if mix_file else ())])
        if not kinds:
            raise TrafficError("no traffic: give --mix or --mix-file")
        commits = load_commits(commit_len)
        _check_texts(kinds, commits)
        objective = Objective(
            ttft_ms=ttft_ms, ttft_ms_per_1k=ttft_ms_per_1k, tpot_ms=tpot_ms, utilization=utilization
        )
        limits = SchedulerOptions(
            context_length=max_total_tokens,
            max_total_tokens=max_total_tokens,
            max_running_requests=max_running_requests,
            chunked_prefill_size=chunked_prefill_size,
            prefill_first=True,
        )
        models, why_not = [], []
        for name in curves:
            curve = load_curve(name)
            try:
                model = Model(curve, commits, kinds, max_total_tokens, max_running_requests)
                models.append((model, model.replicas_for(rate, objective)))
            except CapacityError as error:
                why_not.append(f"{curve.name}: {error}")
        if not models:
            raise CapacityError("; ".join(why_not))
    except (TrafficError, CommitsError, CurveError, CapacityError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    model, state = min(
        models, key=lambda found: (found[0].token_seconds(found[1]), found[1].replicas)
    )
    found = None
    if check_requests is None:
        check_requests = usual_requests(model.mean_steps)
    if check_requests:
        tokenizer = Tokenizer.load(DEFAULT_MODELS / "tiny-target")
        check = Check(model.curve, commits, kinds, limits, tokenizer, rate, check_requests)
        try:
            found = _simulated(check, state.replicas, objective)
        except CapacityError as error:
            raise click.ClickException(str(error)) from error
        state = model.at(rate, found.answer.replicas)
    prices = Prices(node_cost, gateway_ms, gateway_us_per_token, gateway_cores)
    answer = Answer(objective, model, state, found, prices, tuple(models), tuple(why_not))
    click.echo(json.dumps(answer.document(), indent=1) if as_json else words(answer))
    if found is not None and not found.answer.meets(objective, kinds):
        raise click.ClickException(
            f"the objective is still not met in simulation with {state.replicas} replicas; "
            + found.answer.verdict(objective, kinds)
        )


def _check_texts(kinds: tuple[Kind, ...], commits: CommitLengths) -> None:
    for kind in kinds:
        if kind.text not in commits.kinds:
            raise TrafficError(f"text {kind.text!r} is none of {', '.join(commits.kinds)}")


def _simulated(check: Check, formulas: int, objective: Objective) -> Found:
    """With a line on stderr for each fleet, and a bar where that is a terminal."""

    def tell(what: str, run: Callable[[Callable[[float], None]], Checked]) -> Checked:
        terminal = sys.stderr.isatty()
        if not terminal:
            click.echo(f"simulating {what} ... ", nl=False, err=True)
        with click.progressbar(
            length=100, label=f"simulating {what}", file=sys.stderr, hidden=not terminal
        ) as bar:
            seen = run(lambda share: bar.update(int(100 * share) - bar.pos))
        click.echo(seen.verdict(objective, check.kinds), err=True)
        return seen

    return search(
        lambda replicas: tell(f"{replicas} replicas", partial(check.run, replicas)),
        lambda: tell("each request alone", check.alone),
        formulas,
        objective,
        check.kinds,
    )
