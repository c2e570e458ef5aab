"""The same simulation without waiting: arrivals and steps on a clock of its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry

from longleaf.embedded.loads import LoadCounters
from longleaf.embedded.memory import KvMemory
from longleaf.embedded.options import SchedulerOptions
from longleaf.embedded.request import FinishKind, GenerationRequest, StepEvent
from longleaf.embedded.scheduler import Scheduler
from longleaf.embedded.tokenizer import Tokenizer
from longleaf.metrics import EngineMetrics
from longleaf.simulate.commits import CommitLengths
from longleaf.simulate.curve import Curve
from longleaf.simulate.executor import EVICT_AT_LEAST, Pace, SimulatedExecutor


@dataclass(frozen=True, slots=True)
class Job:
    """A request: ``at`` in seconds, lengths in tokens. No two share a prefix."""

    at: float
    prompt_tokens: int
    answer_tokens: int
    text: str


@dataclass(slots=True)
class Served:
    """What became of a job: seconds to the first token and to the last one, None if refused."""

    job: Job
    ttft: float | None = None
    end: float | None = None

    @property
    def tpot(self) -> float | None:
        """Time per token after the first one."""
        if self.ttft is None or self.end is None or self.job.answer_tokens < 2:
            return None
        return (self.end - self.ttft) / (self.job.answer_tokens - 1)


class Offline:
    """One replica."""

    def __init__(
        self, curve: Curve, commits: CommitLengths, limits: SchedulerOptions, tokenizer: Tokenizer
    ) -> None:
        memory, counters = KvMemory(limits.max_total_tokens, EVICT_AT_LEAST), LoadCounters()
        answer = tokenizer.encode("simulated ", add_special_tokens=False)
        metrics = EngineMetrics(CollectorRegistry())
        self._executor = SimulatedExecutor(
            curve, commits, Pace(), answer, memory, counters, metrics
        )
        self._vocab_size = tokenizer.vocab_size
        self._scheduler = Scheduler(
            self._executor, memory, counters, tokenizer, self._vocab_size, limits
        )
        self._now = 0.0
        self._random = np.random.default_rng(1)

    def run(self, jobs: Sequence[Job]) -> list[Served]:
        """Serve ``jobs``, given in order of their arrival, to the end of the last one."""
        served = [Served(job) for job in jobs]
        coming = iter(served)
        following = next(coming, None)
        while following is not None or not self._scheduler.idle:
            if self._scheduler.idle and following is not None:
                self._now = max(self._now, following.job.at)
            while following is not None and following.job.at <= self._now:
                self._add(following)
                following = next(coming, None)
            if not self._scheduler.idle:
                begun = self._now
                self._executor.elapsed = 0.0
                self._begun = begun
                self._scheduler.step()
                self._now = begun + self._executor.elapsed
        return served

    def _add(self, one: Served) -> None:
        self._begun, self._executor.elapsed = self._now, 0.0
        job = one.job

        def note(event: StepEvent) -> None:
            at = self._begun + self._executor.elapsed - job.at
            if event.finish is not None and event.finish.kind is FinishKind.ERROR:
                return
            if one.ttft is None and event.tokens:
                one.ttft = at
            if event.finish is not None:
                one.end = at

        seed = int(self._random.integers(1 << 62))
        prompt = self._random.integers(self._vocab_size, size=job.prompt_tokens, dtype=np.int64)
        request = GenerationRequest(
            rid=f"{seed:x}",
            prompt=prompt,
            seed=seed,
            max_tokens=job.answer_tokens,
            ignore_eos=True,
            text=job.text,
        )
        self._scheduler.add(request, note)


def served_seconds(served: Iterable[Served]) -> tuple[list[float], list[float]]:
    """Times to the first token and times per token of those that were served."""
    told = list(served)
    ttfts = [one.ttft for one in told if one.ttft is not None]
    return ttfts, [one.tpot for one in told if one.tpot is not None]
