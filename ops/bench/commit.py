"""Measure commit_len by text and context, losslessness and speed of the embedded engine.

Run as ``python -m ops.bench.commit``; prints a table and writes ops/results/commit.json. Every
answer is greedy and ignores end-of-text, so that each has its full length. Two engines run: one
drafts trees (budget 16, seeded with the chain), one drafts chains of 7.
"""

import queue
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import click
import numpy as np
from prometheus_client import CollectorRegistry

from longleaf.embedded.engine import Engine
from longleaf.embedded.load import DEFAULT_MODELS, load_models
from longleaf.embedded.options import EngineOptions, SpeculativeOptions
from longleaf.embedded.request import FinishKind, GenerationRequest, StepEvent
from longleaf.embedded.tokenizer import Tokenizer
from longleaf.metrics import EngineMetrics
from longleaf.probes.progress import Progress
from ops.bench.prompts import Prompt, PromptSource
from ops.bench.results import Row, format_table, write_results

BUDGET = 16
CHAIN = 7
CONTEXTS = {"1k": 1024, "4k": 4096, "16k": 16384}
PREDICTABLE_TOKENS = 128
CODE_TOKENS = 96
PROSE_TOKENS = 48
LOSSLESS_PROMPTS = 50
LOSSLESS_TOKENS = 128
LOSSLESS_LENGTHS = (33, 64, 150, 300, 700, 1024, 2000)


@dataclass(frozen=True, slots=True)
class Answer:
    """``seconds``: decode time alone, from the first token's event to the last event."""

    tokens: tuple[int, ...]
    steps: int
    committed: int
    seconds: float

    @property
    def commit_len(self) -> float:
        """Mean tokens a step."""
        return self.committed / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Decode speed; the first token comes from prefill and does not count."""
        return (len(self.tokens) - 1) / self.seconds


def answer(engine: Engine, prompt: Prompt, count: int, *, speculative: bool = True) -> Answer:
    """Decode ``count`` tokens after ``prompt`` greedily."""
    events: queue.SimpleQueue[tuple[float, StepEvent]] = queue.SimpleQueue()
    request = GenerationRequest(
        rid=f"{prompt.name} {speculative} {time.monotonic_ns()}",
        prompt=prompt.tokens,
        max_tokens=count,
        ignore_eos=True,
        speculative=speculative,
    )
    engine.submit(request, lambda event: events.put((time.perf_counter(), event)))
    begin, event = events.get(timeout=600)
    end, tokens = begin, list(event.tokens)
    while event.finish is None:
        end, event = events.get(timeout=600)
        tokens += event.tokens
    if event.finish.kind is not FinishKind.LENGTH or len(tokens) != count:
        raise RuntimeError(f"{prompt.name}: {event.finish} after {len(tokens)} of {count} tokens")
    spec = event.usage.spec
    return Answer(tuple(tokens), spec.steps, spec.committed, end - begin)


def commit_lens(
    engine: Engine, prompts: Sequence[Prompt], count: int, progress: Progress
) -> list[Answer]:
    """One answer a prompt."""
    answers = []
    for prompt in prompts:
        answers.append(answer(engine, prompt, count))
        progress.step(f"{prompt.name}: commit_len {answers[-1].commit_len:.2f}")
    return answers


def mean_row(name: str, answers: Sequence[Answer], bar: float | tuple[float, float] | None) -> Row:
    """Mean over prompts of each prompt's mean commit_len."""
    values = [item.commit_len for item in answers]
    return Row(
        name,
        round(float(np.mean(values)), 3),
        "tokens",
        bar,
        "between" if isinstance(bar, tuple) else "higher",
        len(values),
        _spread(values),
    )


def ratio_row(name: str, tree: Sequence[Answer], chain: Sequence[Answer]) -> Row:
    """commit_len with trees over commit_len with chains, on the same prompts."""
    ratio = np.mean([a.commit_len for a in tree]) / np.mean([a.commit_len for a in chain])
    each = [a.commit_len / b.commit_len for a, b in zip(tree, chain, strict=True)]
    return Row(name, round(float(ratio), 3), "ratio", 1.10, "higher", len(each), _spread(each))


def distinct_share(answers: Sequence[Answer], width: int = 8) -> float:
    """Share of 8-grams that occur once: small models loop, and loops flatter commit_len."""
    shares = []
    for item in answers:
        grams = [item.tokens[i : i + width] for i in range(len(item.tokens) - width + 1)]
        shares.append(len(set(grams)) / len(grams))
    return float(np.mean(shares))


def lossless_prompts(source: PromptSource) -> list[Prompt]:
    """Prompts of every kind and of several lengths."""

    def mixed() -> Iterator[Prompt]:
        for length in LOSSLESS_LENGTHS:
            yield from source.cut("prose", length, 1)
            yield from source.cut("code", length, 1)[:3]
            yield from source.predictable(length, 1)

    prompts = list(mixed())
    assert len(prompts) >= LOSSLESS_PROMPTS
    picked = np.linspace(0, len(prompts) - 1, LOSSLESS_PROMPTS).round().astype(int)
    return [prompts[i] for i in picked]


def measure(tree: Engine, chain: Engine, source: PromptSource, progress: Progress) -> list[Row]:
    """All rows of the benchmark."""
    sets = {
        label: source.predictable(length, 4 if length < 10_000 else 2)
        for label, length in CONTEXTS.items()
    }
    prose, code = source.cut("prose", CONTEXTS["1k"], 10), source.cut("code", CONTEXTS["1k"], 6)
    lossless = lossless_prompts(source)
    progress.expect(
        sum(map(len, sets.values()))
        + 2 * (len(prose) + len(code))
        + len(lossless)
        + len(sets["1k"])
    )
    rows: list[Row] = []
    at_1k = 0.0
    for label, prompts in sets.items():
        answers = commit_lens(tree, prompts, PREDICTABLE_TOKENS, progress)
        bar = 5.0 if label == "1k" else (round(0.85 * at_1k, 3), round(1.15 * at_1k, 3))
        rows.append(mean_row(f"predictable_{label}", answers, bar))
        at_1k = at_1k or rows[-1].value or 0.0
    prose_tree = commit_lens(tree, prose, PROSE_TOKENS, progress)
    rows.append(mean_row("prose_1k", prose_tree, (1.2, 3.5)))
    distinct = round(distinct_share(prose_tree), 3)
    rows.append(Row("prose_1k_distinct_8grams", distinct, "share", n=len(prose_tree)))
    prose_chain = commit_lens(chain, prose, PROSE_TOKENS, progress)
    rows.append(ratio_row("tree_over_chain_prose", prose_tree, prose_chain))
    code_tree = commit_lens(tree, code, CODE_TOKENS, progress)
    code_chain = commit_lens(chain, code, CODE_TOKENS, progress)
    rows.append(mean_row("code_1k", code_tree, None))
    rows.append(ratio_row("tree_over_chain_code", code_tree, code_chain))
    rows.append(_lossless(tree, lossless, progress))
    rows.append(_speedup(tree, sets["1k"], progress))
    return rows


def _lossless(engine: Engine, prompts: Sequence[Prompt], progress: Progress) -> Row:
    same = 0
    for prompt in prompts:
        drafted = answer(engine, prompt, LOSSLESS_TOKENS)
        plain = answer(engine, prompt, LOSSLESS_TOKENS, speculative=False)
        equal = drafted.tokens == plain.tokens
        same += equal
        progress.step(f"{prompt.name}: {'identical' if equal else 'DIFFERENT'}")
    return Row("lossless_prompts", same, "prompts", len(prompts), "higher", len(prompts))


def _speedup(engine: Engine, prompts: Sequence[Prompt], progress: Progress) -> Row:
    """Decode speed with trees over without, prompt by prompt, both sides in one pass."""
    ratios = []
    for prompt in prompts:
        plain = answer(engine, prompt, PREDICTABLE_TOKENS, speculative=False)
        drafted = answer(engine, prompt, PREDICTABLE_TOKENS)
        ratios.append(drafted.tokens_per_second / plain.tokens_per_second)
        progress.step(
            f"{prompt.name}: {drafted.tokens_per_second:.0f} tok/s against "
            f"{plain.tokens_per_second:.0f}"
        )
    median = round(float(np.median(ratios)), 3)
    return Row(
        "speedup_predictable_1k", median, "ratio", 1.5, "higher", len(ratios), _spread(ratios)
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, (25, 75))
    return round(float(low), 3), round(float(high), 3)


def tiny_engine(stack: ExitStack, speculative: SpeculativeOptions) -> tuple[Engine, Tokenizer]:
    """Start the embedded engine on the tiny pair; leaving the stack ends it."""
    options = EngineOptions(
        target=DEFAULT_MODELS / "tiny-target",
        drafter=DEFAULT_MODELS / "tiny-drafter",
        served_model_name="tiny",
        speculative=speculative,
    )
    loaded = load_models(options)
    engine = stack.enter_context(loaded.start(options, EngineMetrics(CollectorRegistry())))
    return engine, loaded.tokenizer


@click.command()
def main() -> None:
    """Measure the table of commit_len and write ops/results/commit.json."""
    with ExitStack() as stack:
        tree, tokenizer = tiny_engine(stack, SpeculativeOptions(budget=BUDGET))
        chain, _ = tiny_engine(stack, SpeculativeOptions(budget=CHAIN, topk=1))
        rows = measure(tree, chain, PromptSource(tokenizer), Progress(sys.stderr))
    path = write_results("commit", "make bench-commit", rows)
    click.echo(format_table(rows))
    click.echo(f"written to {path}")


if __name__ == "__main__":
    main()
