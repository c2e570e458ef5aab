"""The same simulation without waiting: arrivals and steps on a clock of its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longleaf.embedded.loads import LoadCounters
from longleaf.embedded.memory import KvMemory
from longleaf.embedded.options import SchedulerOptions
from longleaf.embedded.request import FinishKind, GenerationRequest, StepEvent
from longleaf.embedded.scheduler import Scheduler
from longleaf.embedded.tokenizer import Tokenizer
from longleaf.simulate.commits import CommitLengths
from longleaf.simulate.curve import Curve
from longleaf.simulate.executor import EVICT_AT_LEAST, Pace, SimulatedExecutor


@dataclass(frozen=True, slots=True)
class Job:
    """A request: ``at`` in seconds, lengths in tokens. No two share a prefix: ``cached_tokens`` of
    the prompt are in the KV pool by then and cost room, no time. ``seed`` makes its tokens and what
    its steps commit; each job needs its own.
    """

    at: float
    prompt_tokens: int
    answer_tokens: int
    text: str
    seed: int
    cached_tokens: int = 0


@dataclass(slots=True)
class Served:
    """What became of a job: seconds to the first token and to the last one, None if refused."""

    job: Job
    ttft: float | None = None
    end: float | None = None


class Offline:
    """One replica. Jobs come in order of their arrival."""

    def __init__(
        self, curve: Curve, commits: CommitLengths, limits: SchedulerOptions, tokenizer: Tokenizer
    ) -> None:
        memory, self._counters = KvMemory(limits.max_total_tokens, EVICT_AT_LEAST), LoadCounters()
        answer = tokenizer.encode("simulated ", add_special_tokens=False)
        self._executor = SimulatedExecutor(
            curve, commits, Pace(), answer, memory, self._counters, None
        )
        self._curve = curve
        self._limits = limits
        self._vocab_size = tokenizer.vocab_size
        self._scheduler = Scheduler(
            self._executor, memory, self._counters, tokenizer, self._vocab_size, limits
        )
        self._now = self._begun = 0.0
        self._unfinished: list[Job] = []
        self._prompts_left = self._prefill_mark = 0.0

    def run(self, jobs: Sequence[Job]) -> list[Served]:
        """Serve ``jobs`` to the end of the last one."""
        served = [Served(job) for job in jobs]
        for one in served:
            self.advance(one.job.at)
            self.add(one, one.job.at)
        self.finish()
        return served

    def add(self, one: Served, at: float) -> None:
        """Queue ``one``, which reaches this replica at ``at``; later calls fill in what becomes of
        it.
        """
        job = one.job
        self._now = max(self._now, at)
        self._begun, self._executor.elapsed = self._now, 0.0
        prompt_seconds = self._prompt_seconds(job)
        self._unfinished.append(job)
        self._prompts_left += prompt_seconds

        def note(event: StepEvent) -> None:
            at = self._begun + self._executor.elapsed - job.at
            failed = event.finish is not None and event.finish.kind is FinishKind.ERROR
            if one.ttft is None and (event.tokens or failed):
                self._prompts_left -= prompt_seconds
                self._prefill_mark = self._counters.prefill_seconds
                one.ttft = None if failed else at
            if event.finish is not None:
                self._unfinished.remove(job)
                one.end = None if failed else at

        tokens = np.random.default_rng(job.seed).integers(
            self._vocab_size, size=job.prompt_tokens, dtype=np.int64
        )
        request = GenerationRequest(
            rid=f"{job.seed:x}",
            prompt=tokens,
            seed=job.seed,
            max_tokens=job.answer_tokens,
            ignore_eos=True,
            text=job.text,
        )
        self._executor.free_tokens[request.rid] = job.cached_tokens
        self._scheduler.add(request, note)

    def step(self) -> None:
        """Run one step."""
        self._begun, self._executor.elapsed = self._now, 0.0
        self._scheduler.step()
        self._now = self._begun + self._executor.elapsed

    def advance(self, until: float) -> None:
        """Run all steps that begin before ``until``."""
        while self._now < until and not self.idle:
            self.step()

    def finish(self) -> None:
        """Run until nothing is left to do."""
        self.advance(math.inf)

    @property
    def now(self) -> float:
        """Seconds; when the last step ended."""
        return self._now

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return self._scheduler.idle

    def prompts_ahead(self, at: float) -> float:
        """Seconds that a prompt which comes at ``at`` waits for the step that runs and for the
        prompts before it.
        """
        begun = self._counters.prefill_seconds - self._prefill_mark
        return max(0.0, self._now - at) + max(0.0, self._prompts_left - begun)

    @property
    def contexts(self) -> list[int]:
        """Of each request that is here: its tokens, half of its answer counted."""
        return [job.prompt_tokens + job.answer_tokens // 2 for job in self._unfinished]

    def has_room(self, job: Job) -> bool:
        """Whether ``job`` would not wait for an answer's end; what it never fits refuses it."""
        if not self._unfinished:
            return True
        held = sum(one.prompt_tokens + one.answer_tokens for one in (*self._unfinished, job))
        rows = self._curve.nodes * (len(self._unfinished) + 1)
        return (
            len(self._unfinished) < self._limits.max_running_requests
            and held + rows <= self._limits.max_total_tokens
        )

    def _prompt_seconds(self, job: Job) -> float:
        return self._curve.prompt_seconds(job.prompt_tokens, job.cached_tokens)
