"""Longleaf's engine families from the SGLang worker, where accepted lengths reach the CPU."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

PHASES = ("draft", "build", "verify", "accept", "compact")


@dataclass(slots=True)
class StepRecord:
    """A decode step whose result is not on the CPU yet.

    path: int32[batch, max_path] on the host, copied there by the step without waiting: it may be
    read once the step's result may. requests: SGLang's, in the batch's order.
    """

    nodes: int
    contexts: tuple[int, ...]
    requests: tuple[Any, ...] = ()
    path: Any = None
    marks: list[Any] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)

    def committing(self) -> list[int]:
        """Return which requests of the batch take what the step committed, before they take it.

        The scheduler launches a step before it knows that the one before was a request's last:
        the tokens of that step are nobody's, and no usage counts them.
        """
        rows = range(len(self.contexts))
        if not self.requests:
            return list(rows)
        return [
            row
            for row in rows
            if not (self.requests[row].finished() or self.requests[row].is_retracted)
        ]

    def paths(self) -> list[list[int]] | None:
        """Return the accepted node ids of each request, the root first; None if not kept."""
        if self.path is None:
            return None
        return [[node for node in row if node >= 0] for row in self.path.tolist()]

    def seconds(self) -> dict[str, float] | None:
        """Return the time of each phase and their sum; None if untimed or still running."""
        if not self.marks or not self.marks[-1].query():
            return None
        times: dict[str, float] = {}
        for name, start, end in zip(self.phases, self.marks, self.marks[1:], strict=False):
            times[name] = times.get(name, 0.0) + start.elapsed_time(end) / 1e3
        times["total"] = self.marks[0].elapsed_time(self.marks[-1]) / 1e3
        return times


class PhaseClock:
    """Times phases of sampled steps with CUDA events: two records a phase, never a wait."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = 0
        self._record: StepRecord | None = None

    def start(self, record: StepRecord) -> None:
        """Begin a step; it is timed if its turn has come."""
        self._record = None
        if self._every and torch.cuda.is_available():
            if self._steps % self._every == 0:
                self._record = record
                self._mark()
            self._steps += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute to a phase what is launched since the last one ended, or the step began."""
        record = self._record
        if record is not None:
            record.phases.append(name)
        yield
        if record is not None:
            self._mark()

    def _mark(self) -> None:
        assert self._record is not None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._record.marks.append(event)


class StepLedger:
    """Pairs each step that was launched with the result that comes back a step later."""

    def __init__(self) -> None:
        self._pending: deque[StepRecord] = deque()

    def launched(self, record: StepRecord) -> None:
        """Note a step, in the order of launching."""
        self._pending.append(record)

    def settle(self, requests: int) -> StepRecord | None:
        """Return the oldest step of that many requests, dropping older ones that never ended."""
        while self._pending:
            record = self._pending.popleft()
            if len(record.contexts) == requests:
                return record
        return None


class EngineObserver:
    """Observes the engine families. On rank 0 alone: what they say is the same on every rank.

    Imports prometheus_client only here, in the scheduler's process, where SGLang has set
    PROMETHEUS_MULTIPROC_DIR already: the values go to its files, and SGLang's /metrics reads them.
    """

    def __init__(self, row_bytes: int, layers: int, window: int | None) -> None:
        from prometheus_client import CollectorRegistry

        from longleaf.metrics import EngineMetrics, context_bucket

        self._families = EngineMetrics(CollectorRegistry())
        self._bucket = context_bucket
        self._token_bytes = row_bytes * layers
        self._window = window
        if window is not None:
            self._families.drafter_window_tokens.set(window)

    def observe(
        self, record: StepRecord, accepted: Sequence[int], free_tokens: int | None = None
    ) -> None:
        """Observe a settled step; accepted: drafts accepted by each request.

        Time and bytes are the whole batch's, what is committed that of requests that take it. The
        depth is the accepted path's own, so that a fault in either count shows beside the other.
        """
        families = self._families
        paths = record.paths()
        for row in record.committing():
            context, drafts = record.contexts[row], accepted[row]
            bucket = self._bucket(context)
            families.commit_len.labels(bucket).observe(drafts + 1)
            depth = drafts if paths is None else len(paths[row]) - 1
            families.accepted_depth.labels(bucket).observe(depth)
            families.tree_nodes.labels(bucket).observe(record.nodes)
            if record.nodes > 1:
                span = context if self._window is None else min(context, self._window)
                families.drafter_span_tokens.labels(bucket).observe(span)
        read = sum(record.contexts) * self._token_bytes
        families.kv_read_bytes.inc(read)
        times = record.seconds()
        if times is not None:
            longest = max(record.contexts)
            bucket = self._bucket(longest)
            families.timed_context_tokens.labels(bucket).inc(longest)
            families.timed_verify_bytes.inc(read)
            families.timed_verify_seconds.inc(times.get("verify", 0.0))
            if record.nodes == 1:
                families.plain_step_seconds.labels(bucket).observe(times["total"])
            for phase, seconds in times.items():
                families.step_seconds.labels(phase, bucket).observe(seconds)
        if free_tokens is not None:
            families.kv_pool_tokens.labels("free").set(free_tokens)
