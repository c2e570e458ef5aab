"""``longleaf probe step``: step time against context, its line, and what the card could do."""

from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import aiohttp

from longleaf.probes.chart import Point, page
from longleaf.probes.client import ProbeError, Server, complete, find_server, session, steps_of
from longleaf.probes.exposition import engine_metrics
from longleaf.probes.lengths import label, usual
from longleaf.probes.line import Line, StepCell, fit
from longleaf.probes.progress import Progress
from longleaf.probes.prompts import prompt_of
from longleaf.probes.report import document
from longleaf.probes.texts import REFERENCE

_OFF = 0.5
_SLOWER = 1.05
_WARM_UP = 16
"""Tokens."""
_NO_BYTES = "the engine's metrics tell no KV bytes (--kv-bytes-per-token)"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to ask of each engine. ``contexts``: None for those usual on the servers.
    ``token_bytes``: KV bytes of a token on one GPU, None to take them from the engine's metrics.
    ``peak``: bytes a second of the card's memory, if known.
    """

    urls: tuple[str, ...]
    metrics_urls: tuple[str, ...]
    contexts: tuple[int, ...] | None
    repeats: int = 3
    max_tokens: int = 96
    token_bytes: float | None = None
    peak: float | None = None
    max_ratio: float | None = None
    timeout: float = 1800.0
    metrics_required: bool = False
    api_key: str | None = None


@dataclass(slots=True)
class EngineRun:
    """One engine's cells."""

    url: str
    cells: list[StepCell]
    token_bytes: float | None = None

    @property
    def line(self) -> Line | None:
        """Through the means."""
        return fit([(cell.tokens, cell.mean) for cell in self.cells if cell.mean is not None])


@dataclass(slots=True)
class StepRun:
    """What was measured so far."""

    plan: StepPlan
    engines: list[EngineRun] = field(default_factory=list)
    partial: bool = True

    @property
    def passed(self) -> bool:
        """Whether it ended, and found no fault."""
        return not self.partial and not self.faults()

    def faults(self) -> list[str]:
        """What fails the probe, in words."""
        found: list[str] = []
        for engine in self.engines:
            line = engine.line
            measured = [cell for cell in engine.cells if cell.mean is not None]
            found += [
                f"{engine.url} {label(cell.context)}: {cell.why}"
                for cell in engine.cells
                if cell.why
            ]
            if line is None:
                found.append(f"{engine.url}: no line, fewer than two contexts were measured")
                continue
            for cell in measured:
                off = (cell.mean or 0.0) / line.at(cell.tokens) - 1
                if abs(off) > _OFF:
                    found.append(f"{engine.url}: {label(cell.context)} is {off:+.0%} off the line")
            ratio, most = self.ratio(engine), self.plan.max_ratio
            if most is not None and ratio is not None and ratio > most:
                found.append(
                    f"{engine.url}: a token of context costs {ratio:.1f} times the card's floor, "
                    f"more than {most:g}"
                )
            if most is not None and (engine.token_bytes is None or self.plan.peak is None):
                found.append(f"{engine.url}: the ratio is not known, for {_NO_BYTES}")
        if len(self.engines) == 2:
            found += self._slower()
        return found

    def _slower(self) -> list[str]:
        first, second = self.engines
        return [
            f"{first.url} is {one.mean / other.mean:.2f} times as slow as {second.url} at "
            f"{label(one.context)}"
            for one, other in zip(first.cells, second.cells, strict=True)
            if one.mean is not None and other.mean is not None
            if one.mean > _SLOWER * other.mean
        ]

    def ratio(self, engine: EngineRun) -> float | None:
        """What a token of context costs, over what reading its KV costs at the card's peak."""
        line = engine.line
        if line is None or line.slope <= 0 or engine.token_bytes is None:
            return None
        return None if self.plan.peak is None else line.slope / engine.token_bytes * self.plan.peak

    def floor(self, engine: EngineRun, tokens: float) -> float | None:
        """Seconds to read the KV of ``tokens`` once, at the card's peak; None if unknown."""
        if engine.token_bytes is None or self.plan.peak is None:
            return None
        return tokens * engine.token_bytes / self.plan.peak

    def words(self) -> str:
        """The answer."""
        faults = "; ".join(self.faults())
        said = " ".join(self._of(engine) for engine in self.engines) or "Nothing was measured."
        return said + f" {faults}." * bool(faults)

    def _of(self, engine: EngineRun) -> str:
        line = engine.line
        if line is None:
            for cell in engine.cells:
                if cell.mean is not None:
                    step = f"{cell.mean * 1e3:.2f} ms a step at {label(cell.context)}"
                    return f"{engine.url}: {step}, and no line through one context."
            return f"{engine.url}: not measured."
        ratio = self.ratio(engine)
        if line.slope > 0:
            text = (
                f"{engine.url}: {line.constant * 1e3:.2f} ms and {line.slope * 1e6:.3f} ms a "
                "thousand tokens of context"
            )
            if engine.token_bytes is not None:
                bandwidth = line.bandwidth(engine.token_bytes) or 0.0
                text += f", an effective {bandwidth / 1e9:.1f} GB/s"
            text += "." if ratio is None else f", {ratio:.1f} times the card's floor."
        else:
            text = self._flat(engine)
        unknown = self.plan.peak is not None and engine.token_bytes is None
        return text + f" No floor of it: {_NO_BYTES}." * unknown

    def _flat(self, engine: EngineRun) -> str:
        """Of steps that do not grow: the context costs less than they differ by anyway."""
        measured = [(cell, cell.mean) for cell in engine.cells if cell.mean is not None]
        (first, shortest), (last, longest) = measured[0], measured[-1]
        text = (
            f"{engine.url}: {shortest * 1e3:.2f} ms a step at {label(first.context)} and "
            f"{longest * 1e3:.2f} at {label(last.context)}: steps do not grow with the context, so "
            "that no bandwidth can be told; longer --contexts or more --repeats may show it."
        )
        floor = self.floor(engine, last.tokens)
        if floor is not None:
            text += (
                f" At {label(last.context)} reading the KV takes {floor * 1e3:.2f} ms of the step "
                "at the card's peak: what is not attention decides."
            )
        return text

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        engines = []
        for engine in self.engines:
            line = engine.line
            known = line is not None and engine.token_bytes is not None
            engines.append(
                {
                    "url": engine.url,
                    "constant_seconds": line.constant if line else None,
                    "slope_seconds_per_token": line.slope if line else None,
                    "kv_bytes_per_token": engine.token_bytes,
                    "effective_bytes_per_second": (
                        line.bandwidth(engine.token_bytes or 0.0) if line and known else None
                    ),
                    "floor_ratio": self.ratio(engine),
                    "cells": [
                        {
                            **asdict(cell),
                            "mean": cell.mean,
                            "floor": self.floor(engine, cell.tokens),
                        }
                        for cell in engine.cells
                    ],
                }
            )
        return document(
            "step",
            self.plan.urls[0],
            partial=self.partial,
            peak_bytes_per_second=self.plan.peak,
            passed=self.passed,
            faults=self.faults(),
            words=self.words(),
            engines=engines,
        )

    def table(self) -> list[list[str]]:
        """Rows of text: a context of an engine each."""
        rows = [["engine", "context", "step ms", "fitted", "floor", "tokens a step", "n", ""]]
        for engine in self.engines:
            line = engine.line
            for cell in engine.cells:
                mean, floor = cell.mean, self.floor(engine, cell.tokens)
                figures = ["-"] * 4
                if mean is not None:
                    figures = [
                        f"{mean * 1e3:.2f}",
                        "-" if line is None else f"{line.at(cell.tokens) * 1e3:.2f}",
                        "-" if floor is None else f"{floor * 1e3:.2f}",
                        f"{fmean(cell.tokens_per_step):.2f}",
                    ]
                count = str(len(cell.samples))
                rows.append([engine.url, label(cell.context), *figures, count, cell.why])
        return rows

    def page(self) -> str:
        """The HTML page."""
        curves: dict[str, list[Point]] = {}
        for engine in self.engines:
            measured = [cell for cell in engine.cells if cell.samples]
            curves[engine.url] = [
                Point(
                    cell.tokens,
                    (cell.mean or 0.0) * 1e3,
                    min(cell.samples) * 1e3,
                    max(cell.samples) * 1e3,
                )
                for cell in measured
            ]
            floors = [(cell.tokens, self.floor(engine, cell.tokens)) for cell in measured]
            line = [Point(x, *[y * 1e3] * 3) for x, y in floors if y is not None]
            if line:
                curves[f"floor of {engine.url}"] = line
        return page("Step time by context", self.words(), "ms a step", curves, self.table())


async def measure(run: StepRun, progress: Progress) -> None:
    """Fill ``run``, one engine after the other. What is there when it is cancelled stays."""
    plan = run.plan
    async with session(plan.timeout) as http:
        servers = [await find_server(http, url, plan.api_key) for url in plan.urls]
        rooms = [room for one in servers if (room := one.room(plan.max_tokens)) is not None]
        contexts = plan.contexts or usual(min(rooms, default=None))
        progress.expect(len(servers) * len(contexts) * plan.repeats)
        for number, (server, metrics_url) in enumerate(
            zip(servers, plan.metrics_urls, strict=True)
        ):
            before = await engine_metrics(
                http, metrics_url, required=plan.metrics_required and number == 0
            )
            cells = [
                StepCell(context, [], [], why=server.refuses(context, plan.max_tokens))
                for context in contexts
            ]
            engine = EngineRun(server.url, cells, plan.token_bytes)
            run.engines.append(engine)
            for cell in cells:
                await _measure_cell(plan, http, server, cell, progress)
            after = await engine_metrics(http, metrics_url)
            if engine.token_bytes is None and before is not None and after is not None:
                engine.token_bytes = _token_bytes(before, after)
    run.partial = False


async def _measure_cell(
    plan: StepPlan,
    http: aiohttp.ClientSession,
    server: Server,
    cell: StepCell,
    progress: Progress,
) -> None:
    lengths: list[int] = []
    try:
        if cell.why:
            raise ProbeError(cell.why)
        text = await prompt_of(http, server, REFERENCE, cell.context, 0)
        # The prefix is cached, and what runs for the first time has run, before a step is timed.
        await complete(http, server, text, max_tokens=min(plan.max_tokens, _WARM_UP))
        for _ in range(plan.repeats):
            answer = await complete(http, server, text, max_tokens=plan.max_tokens)
            steps = steps_of(answer)
            lengths.append(answer.prompt_tokens)
            cell.tokens = fmean(lengths) + answer.completion_tokens / 2
            cell.samples.append(answer.decode_seconds / steps)
            cell.tokens_per_step.append((answer.completion_tokens - 1) / steps)
            progress.step(f"{server.url} {label(cell.context)}: {cell.samples[-1] * 1e3:.2f} ms")
    except ProbeError as error:
        cell.why = str(error)
        progress.step(f"{server.url} {label(cell.context)}: {error}")


def _token_bytes(before: dict[str, float], after: dict[str, float]) -> float | None:
    """KV bytes that a step reads for a token of context, by what the engine counted."""
    read, tokens = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("longleaf_timed_verify_kv_bytes_total", "longleaf_timed_context_tokens_total")
    )
    return read / tokens if read > 0 and tokens > 0 else None
