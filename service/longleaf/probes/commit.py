"""``longleaf probe commit``: does the text, the context or a fault decide commit_len?"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry, write_to_textfile

from longleaf.metrics import ProbeMetrics, context_bucket
from longleaf.probes.chart import Point, page
from longleaf.probes.client import Answer, ProbeError, Server, complete, engine_metrics, find_server
from longleaf.probes.judge import Cell, Judgement, Totals, judge
from longleaf.probes.lengths import label
from longleaf.probes.progress import Progress
from longleaf.probes.report import document
from longleaf.probes.texts import TEXTS

_CALIBRATION = 16_000
"""Characters, at most, of the beginning of a text by which its length in tokens is estimated."""


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """What to ask. ``repeats``: seeds a cell, each of another text. Greedy at temperature 0."""

    url: str
    metrics_url: str
    contexts: tuple[int, ...]
    texts: tuple[str, ...] = tuple(TEXTS)
    repeats: int = 3
    max_tokens: int = 64
    temperature: float = 0.0
    timeout: float = 1800.0


@dataclass(slots=True)
class CommitRun:
    """What was measured so far; complete once ``partial`` is false."""

    plan: CommitPlan
    cells: list[Cell]
    totals: Totals = field(default_factory=Totals)
    partial: bool = True

    @classmethod
    def of(cls, plan: CommitPlan) -> "CommitRun":
        """An empty run: a cell for each text and context."""
        cells = [Cell(text, context) for text in plan.texts for context in plan.contexts]
        return cls(plan, cells)

    def judgement(self) -> Judgement:
        """The answer, by what there is."""
        return judge(self.cells, self.totals)

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        said = self.judgement()
        return document(
            "commit",
            self.plan.url,
            partial=self.partial,
            verdict=said.verdict,
            cause=said.cause,
            words=said.words,
            passed=said.verdict.passed and not self.partial,
            cells=[
                {**asdict(cell), "mean": cell.mean, "spread": cell.spread} for cell in self.cells
            ],
            totals=asdict(self.totals),
        )

    def table(self) -> list[list[str]]:
        """Rows of text: a text and context each."""
        rows = [["text", "context", "commit_len", "least", "most", "n", ""]]
        for cell in self.cells:
            mean, spread = cell.mean, cell.spread
            figures = ["-", "-", "-"]
            if mean is not None and spread is not None:
                figures = [f"{value:.2f}" for value in (mean, *spread)]
            count = str(len(cell.samples))
            rows.append([cell.text, label(cell.context), *figures, count, cell.why])
        return rows

    def page(self) -> str:
        """The HTML page."""
        curves: dict[str, list[Point]] = {}
        for cell in self.cells:
            mean, spread = cell.mean, cell.spread
            if mean is not None and spread is not None:
                tokens = sum(cell.prompt_tokens) / len(cell.prompt_tokens)
                curves.setdefault(cell.text, []).append(Point(tokens, mean, *spread))
        said = self.judgement()
        words = f"{said.verdict}. {said.words}" + (" (interrupted)" if self.partial else "")
        return page("commit_len by text and context", words, "tokens a step", curves, self.table())

    def write_textfile(self, path: Path, expected: dict[tuple[str, int], float]) -> None:
        """Write the run for Prometheus' textfile collector; ``expected`` as for ``publish``."""
        registry = CollectorRegistry()
        self.publish(ProbeMetrics(registry), expected)
        write_to_textfile(str(path), registry)

    def publish(self, metrics: ProbeMetrics, expected: dict[tuple[str, int], float]) -> None:
        """Set ``metrics`` to this run, and to nothing else. ``expected``: by text and context, from
        a run that was good; by default what the text reached at the shortest context.
        """
        for family in (metrics.commit_len, metrics.commit_len_expected, metrics.passed):
            family.clear()
        shortest = {cell.text: cell.mean for cell in reversed(self.cells) if cell.mean is not None}
        for cell in self.cells:
            if cell.mean is None:
                continue
            labels = cell.text, context_bucket(cell.context)
            metrics.commit_len.labels(*labels).set(cell.mean)
            wanted = expected.get((cell.text, cell.context), shortest[cell.text])
            metrics.commit_len_expected.labels(*labels).set(wanted or 0.0)
        said = self.judgement()
        metrics.passed.labels("commit", said.verdict).set(said.verdict.passed)
        metrics.timestamp.labels("commit").set_to_current_time()


def expected_of(found: dict[str, Any]) -> dict[tuple[str, int], float]:
    """commit_len by text and context of an earlier run's JSON."""
    return {
        (cell["text"], int(cell["context"])): float(cell["mean"])
        for cell in found["cells"]
        if cell["mean"] is not None
    }


async def measure(run: CommitRun, progress: Progress) -> None:
    """Fill ``run`` cell by cell. What is there when it is cancelled stays."""
    plan = run.plan
    timeout = aiohttp.ClientTimeout(total=plan.timeout)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        server = await find_server(http, plan.url)
        before = await engine_metrics(http, plan.metrics_url)
        try:
            await _measure_cells(run, http, server, progress)
            run.partial = False
        finally:
            after = await asyncio.shield(engine_metrics(http, plan.metrics_url))
            if before is not None and after is not None:
                run.totals.metrics = {
                    name: value - before.get(name, 0.0) for name, value in after.items()
                }
                run.totals.window = after.get("longleaf_drafter_window_tokens")


async def _measure_cells(
    run: CommitRun, http: aiohttp.ClientSession, server: Server, progress: Progress
) -> None:
    plan = run.plan
    progress.expect(len(run.cells) * plan.repeats)
    # Seeds outermost: what an interrupted run has, it has of every cell.
    for seed in range(plan.repeats):
        for cell in run.cells:
            what = f"{cell.text} {label(cell.context)}"
            if cell.why:
                progress.step(what)
                continue
            try:
                answer = await complete(
                    http,
                    server,
                    await _text(http, server, cell, seed),
                    max_tokens=plan.max_tokens,
                    temperature=plan.temperature,
                    seed=seed,
                )
            except ProbeError as error:
                cell.why = str(error)
                progress.step(f"{what}: {cell.why}")
                continue
            _take(run, cell, answer)
            progress.step(f"{what}: {cell.samples[-1] if cell.samples else 0.0:.2f}")


async def _text(http: aiohttp.ClientSession, server: Server, cell: Cell, seed: int) -> str:
    """Text of about ``cell.context`` tokens, by the server's own count of its beginning."""
    build = TEXTS[cell.text]
    begin = build(min(cell.context, _CALIBRATION), seed)  # a token is a character or more
    answer = await complete(http, server, begin, max_tokens=1)
    return build(round(cell.context * len(begin) / answer.prompt_tokens), seed)


def _take(run: CommitRun, cell: Cell, answer: Answer) -> None:
    if answer.steps == 0:
        cell.why = "the answer reports no speculative steps (SGLang's are told by an engine's URL)"
        return
    totals = run.totals
    cell.samples.append((answer.completion_tokens - 1) / answer.steps)
    cell.prompt_tokens.append(answer.prompt_tokens)
    totals.answers += 1
    totals.steps += answer.steps
    totals.committed += answer.completion_tokens - 1
    totals.events += answer.events
    totals.reported += answer.commit_len * answer.steps
    totals.correct_drafts += answer.correct_drafts
    totals.proposed_drafts += answer.proposed_drafts


def failed_cells(cells: Sequence[Cell]) -> list[str]:
    """What could not be measured, with the reason."""
    return [f"{cell.text} {label(cell.context)}: {cell.why}" for cell in cells if cell.why]
