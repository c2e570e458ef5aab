"""``longleaf probe commit``: does the text, the context or a fault decide commit_len?"""

import asyncio
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry, write_to_textfile

from longleaf.metrics import ProbeMetrics, context_bucket
from longleaf.probes.accounting import Totals
from longleaf.probes.baseline import Expected
from longleaf.probes.chart import Point, page
from longleaf.probes.client import Answer, ProbeError, Server, complete, find_server, session
from longleaf.probes.exposition import engine_metrics
from longleaf.probes.judge import Cell, Judgement, judge
from longleaf.probes.lengths import label, usual
from longleaf.probes.progress import Progress
from longleaf.probes.prompts import prompt_of
from longleaf.probes.report import document
from longleaf.probes.texts import TEXTS

_TEXTFILE_SECONDS = 2 * 86_400.0
"""A textfile is of a daily run, at least."""


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """What to ask. ``contexts``: None for those usual on this server. ``repeats``: seeds a cell,
    each of another text. Greedy at temperature 0. Without metrics the run fails if they are
    ``metrics_required``.
    """

    url: str
    metrics_url: str
    contexts: tuple[int, ...] | None
    texts: tuple[str, ...] = tuple(TEXTS)
    repeats: int = 3
    max_tokens: int = 64
    temperature: float = 0.0
    timeout: float = 1800.0
    metrics_required: bool = False
    api_key: str | None = None


@dataclass(slots=True)
class CommitRun:
    """What was measured so far; complete once ``partial`` is false."""

    plan: CommitPlan
    cells: list[Cell] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    partial: bool = True

    def judgement(self) -> Judgement:
        """The answer, by what there is."""
        return judge(self.cells, self.totals)

    @property
    def passed(self) -> bool:
        """Whether it ended, and found no fault."""
        return self.judgement().verdict.passed and not self.partial

    def words(self) -> str:
        """The answer in words."""
        said = self.judgement()
        cause = f" ({said.cause})" if said.cause else ""
        checked = self.totals.metrics is not None
        note = f" Not checked against metrics: no engine's at {self.plan.metrics_url}."
        return f"{said.verdict}{cause}: {said.words}" + note * (not checked)

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
            passed=self.passed,
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
        words = self.words() + (" (interrupted)" if self.partial else "")
        return page("commit_len by text and context", words, "tokens a step", curves, self.table())

    def write_textfile(self, path: Path, expected: Expected) -> None:
        """Write the run for Prometheus' textfile collector; ``expected`` as for ``publish``."""
        registry = CollectorRegistry()
        metrics = ProbeMetrics(registry)
        metrics.max_age.labels("commit").set(_TEXTFILE_SECONDS)
        self.publish(metrics, expected)
        write_to_textfile(str(path), registry)

    def publish(self, metrics: ProbeMetrics, expected: Expected) -> None:
        """Set ``metrics`` to this run, and to nothing else. ``expected``: by text and context, from
        a run that was good; by default what the text reached at the shortest context. Of contexts
        that share a bucket, the one furthest below what is expected.
        """
        for family in (metrics.commit_len, metrics.commit_len_expected, metrics.passed):
            family.clear()
        shortest = {cell.text: cell.mean for cell in reversed(self.cells) if cell.mean is not None}
        found = [
            (cell.mean, expected.get((cell.text, cell.context), shortest[cell.text] or 0.0), cell)
            for cell in self.cells
            if cell.mean is not None
        ]
        for mean, wanted, cell in sorted(found, key=lambda one: one[1] - one[0]):
            labels = cell.text, context_bucket(cell.context)
            metrics.commit_len.labels(*labels).set(mean)
            metrics.commit_len_expected.labels(*labels).set(wanted)
        verdict = self.judgement().verdict
        metrics.passed.labels("commit", verdict).set(verdict.passed)
        metrics.timestamp.labels("commit").set_to_current_time()


async def measure(run: CommitRun, progress: Progress) -> None:
    """Fill ``run`` cell by cell. What is there when it is cancelled stays."""
    plan = run.plan
    async with session(plan.timeout) as http:
        server = await find_server(http, plan.url, plan.api_key)
        before = await engine_metrics(http, plan.metrics_url, required=plan.metrics_required)
        contexts = plan.contexts or usual(server.room(plan.max_tokens))
        run.cells = [
            Cell(text, context, why=server.refuses(context, plan.max_tokens))
            for text in plan.texts
            for context in contexts
        ]
        try:
            await _measure_cells(run, http, server, progress)
        finally:
            after = await asyncio.shield(engine_metrics(http, plan.metrics_url))
            if before is not None and after is not None:
                run.totals.metrics = {
                    name: after.get(name, 0.0) - before.get(name, 0.0) for name in before | after
                }
                run.totals.window = after.get("longleaf_drafter_window_tokens")
    run.partial = False


async def _measure_cells(
    run: CommitRun, http: aiohttp.ClientSession, server: Server, progress: Progress
) -> None:
    plan = run.plan
    progress.expect(len(run.cells) * plan.repeats)
    # Seeds outermost: what an interrupted run has, it has of every cell.
    for seed in range(plan.repeats):
        for cell in run.cells:
            what = f"{cell.text} {label(cell.context)}"
            if not cell.why:
                try:
                    await _sample(run, http, server, cell, seed)
                    what += f": {cell.samples[-1]:.2f}"
                except ProbeError as error:
                    cell.why = str(error)
            progress.step(f"{what}: {cell.why}" if cell.why else what)


async def _sample(
    run: CommitRun, http: aiohttp.ClientSession, server: Server, cell: Cell, seed: int
) -> None:
    plan = run.plan
    prompt = await prompt_of(http, server, cell.text, cell.context, seed)
    answer = await complete(
        http,
        server,
        prompt,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        seed=seed,
    )
    _take(run.totals, cell, answer)


def _take(totals: Totals, cell: Cell, answer: Answer) -> None:
    if answer.steps == 0:
        raise ProbeError(
            "the answer reports no speculative steps (SGLang's are told by an engine's URL)"
        )
    cell.samples.append((answer.completion_tokens - 1) / answer.steps)
    cell.prompt_tokens.append(answer.prompt_tokens)
    totals.answers += 1
    totals.steps += answer.steps
    totals.committed += answer.completion_tokens - 1
    totals.events += answer.events
    totals.reported += answer.commit_len * answer.steps
    totals.correct_drafts += answer.correct_drafts
    totals.proposed_drafts += answer.proposed_drafts
