"""Holds the formulas to the simulation: one replica under its share of the traffic."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from longleaf.capacity.model import Objective
from longleaf.capacity.traffic import Kind
from longleaf.embedded.options import SchedulerOptions
from longleaf.embedded.tokenizer import Tokenizer
from longleaf.simulate.commits import CommitLengths
from longleaf.simulate.curve import Curve
from longleaf.simulate.offline import Job, Offline, Served


@dataclass(frozen=True, slots=True)
class Checked:
    """What the simulation served: mean seconds, ``ttft`` of each kind (None: it saw none)."""

    requests: int
    ttft: tuple[float | None, ...]
    tpot: float

    def meets(self, objective: Objective, kinds: Sequence[Kind]) -> bool:
        """Whether the means are within ``objective``."""
        late = any(
            ttft is not None and ttft > objective.ttft_bound(kind)
            for kind, ttft in zip(kinds, self.ttft, strict=True)
        )
        return not late and (objective.tpot_ms is None or self.tpot * 1e3 <= objective.tpot_ms)


def poisson_jobs(kinds: Sequence[Kind], rate: float, count: int, seed: int) -> list[Job]:
    """``count`` requests of the mix at ``rate`` a second. What is cached counts as not there."""
    random_, at, jobs = random.Random(seed), 0.0, []
    for _ in range(count):
        at += random_.expovariate(rate)
        kind = random_.choices(kinds, [one.share for one in kinds])[0]
        prompt = max(1, kind.prompt_tokens - kind.cached_tokens)
        jobs.append(Job(at, prompt, kind.answer_tokens, kind.text))
    return jobs


def check(
    curve: Curve,
    commits: CommitLengths,
    kinds: Sequence[Kind],
    limits: SchedulerOptions,
    tokenizer: Tokenizer,
    rate: float,
    requests: int,
    seed: int = 1,
) -> Checked:
    """Simulate one replica under ``rate`` requests a second."""
    jobs = poisson_jobs(kinds, rate, requests, seed)
    served = Offline(curve, commits, limits, tokenizer).run(jobs)
    return Checked(requests, tuple(_ttft(served, kind) for kind in kinds), _tpot(served))


def _ttft(served: Sequence[Served], kind: Kind) -> float | None:
    prompt = kind.prompt_tokens - kind.cached_tokens
    times = [
        one.ttft
        for one in served
        if one.ttft is not None
        and (one.job.prompt_tokens, one.job.answer_tokens) == (prompt, kind.answer_tokens)
    ]
    return statistics.fmean(times) if times else None


def _tpot(served: Sequence[Served]) -> float:
    """Over all tokens."""
    seconds = tokens = 0.0
    for one in served:
        if one.ttft is not None and one.end is not None:
            seconds += one.end - one.ttft
            tokens += one.job.answer_tokens - 1
    return seconds / tokens if tokens else 0.0
