"""Simulate the adaptive budget on recorded acceptance, against every fixed width.

Run as ``python -m ops.bench.budget``; writes ops/results/budget.json. Acceptance is real: at every
position of greedy answers of the embedded engine, the path that the drafter's tree of 64 nodes
accepts. Step times are not: they are `StepCosts`, whose defaults are estimates for 61 layers on one
H200. The drafter and target are the tiny pair, at contexts of 1k tokens; the longer contexts enter
through the step times alone. Hence the rows' ending ``_simulated``.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import click

from longleaf.ddtree.budget import BudgetController, StepCosts
from longleaf.embedded.load import DEFAULT_MODELS, load_models
from longleaf.embedded.options import EngineOptions
from longleaf.probes.progress import Progress
from ops.bench.budget_traces import Trace, record_trace
from ops.bench.prompts import PromptSource
from ops.bench.results import Row, format_table, write_results

WIDTHS = (1, 8, 16, 32, 64)
CONTEXTS = {"1k": 1024, "16k": 16384, "64k": 65536}
PROMPT_TOKENS = 1024
TRACE_TOKENS = 256
OTHER_COSTS = {
    "slow_tensor": StepCosts(flop_per_ms=1.5e11),
    "short_step": StepCosts(fixed_ms=2.0, draft_ms=1.5),
}
"""Other machines; the constants of the controller were chosen over these and the default."""
TOKENS = 4000
"""What each simulated request decodes: its kind's traces again and again, one after another."""


def simulate(
    traces: Sequence[Trace], context: int, costs: StepCosts, widths: Sequence[int]
) -> float:
    """Milliseconds for `TOKENS` tokens with the controller over `widths`; one of them is fixed."""
    controller = BudgetController(widths, costs)
    milliseconds, done = 0.0, 0
    while done < TOKENS:
        for trace in traces:
            position = 0
            while position < len(trace.paths) and done < TOKENS:
                width = controller.choose(context, 1)
                path = [node for node in trace.paths[position] if node < width]
                milliseconds += costs.milliseconds(width, context)
                position += 1 + len(path)
                done += 1 + len(path)
                controller.observe(width, [len(path)], [path])
    return milliseconds / done * TOKENS


def record(progress: Progress) -> dict[str, list[Trace]]:
    """Traces of predictable text, code and prose."""
    loaded = load_models(
        EngineOptions(
            target=DEFAULT_MODELS / "tiny-target",
            drafter=DEFAULT_MODELS / "tiny-drafter",
            served_model_name="tiny",
            max_total_tokens=PROMPT_TOKENS + TRACE_TOKENS + 16,
        )
    )
    source = PromptSource(loaded.tokenizer)
    prompts = {
        "predictable": source.predictable(PROMPT_TOKENS, 2),
        "code": source.cut("code", PROMPT_TOKENS, 2)[:12],
        "prose": source.cut("prose", PROMPT_TOKENS, 6)[:16],
    }
    progress.expect(sum(map(len, prompts.values())))
    traces: dict[str, list[Trace]] = {}
    for kind, texts in prompts.items():
        traces[kind] = []
        for prompt in texts:
            traces[kind].append(record_trace(loaded.models, prompt, TRACE_TOKENS))
            progress.step(f"{kind}: {prompt.name}")
    return traces


def evaluate(traces: dict[str, list[Trace]], costs: StepCosts) -> list[Row]:
    """Regret by kind and context, the worst of them, and the gain over every width on the mix."""
    rows: list[Row] = []
    regrets: list[float] = []
    adaptive_total = 0.0
    fixed_totals = dict.fromkeys(WIDTHS, 0.0)
    for kind, texts in traces.items():
        for label, context in CONTEXTS.items():
            fixed = {width: simulate(texts, context, costs, (width,)) for width in WIDTHS}
            adaptive = simulate(texts, context, costs, WIDTHS)
            best = min(fixed, key=lambda width: fixed[width])
            regret = adaptive / fixed[best] - 1.0
            regrets.append(regret)
            rows.append(Row(f"adaptive_regret_{kind}_{label}_simulated", round(regret, 4), "ratio"))
            rows.append(Row(f"best_width_{kind}_{label}_simulated", best, "nodes"))
            adaptive_total += adaptive
            for width in WIDTHS:
                fixed_totals[width] += fixed[width]
    best_total = min(fixed_totals.values())
    rows += [
        Row(f"fixed_{width}_over_adaptive_mix_simulated", round(total / adaptive_total, 4), "ratio")
        for width, total in fixed_totals.items()
    ]
    gain = Row(
        "adaptive_gain_over_best_fixed_mix_simulated",
        round(best_total / adaptive_total, 4),
        "ratio",
        1.0,
        "higher",
    )
    worst = Row(
        "adaptive_worst_regret_simulated",
        round(max(regrets), 4),
        "ratio",
        0.03,
        "lower",
        len(regrets),
    )
    return [worst, gain, *rows]


@click.command()
def main() -> None:
    """Simulate the adaptive budget and write ops/results/budget.json."""
    traces = record(Progress(sys.stderr))
    rows = evaluate(traces, StepCosts())
    for name, costs in OTHER_COSTS.items():
        worst = evaluate(traces, costs)[0]
        rows.append(replace(worst, name=f"adaptive_worst_regret_{name}_simulated"))
    path = write_results("budget", "make bench-budget", rows)
    click.echo(format_table(rows))
    click.echo(f"written to {path}")


if __name__ == "__main__":
    main()
