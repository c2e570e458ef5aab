"""Holds the formulas to the simulation: the fleet under the whole traffic."""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from longleaf.capacity.model import Objective
from longleaf.capacity.traffic import Kind
from longleaf.embedded.options import SchedulerOptions
from longleaf.embedded.tokenizer import Tokenizer
from longleaf.simulate.commits import CommitLengths
from longleaf.simulate.curve import Curve
from longleaf.simulate.fleet import Fleet
from longleaf.simulate.offline import Job, Offline, Served

MOST_REPLICAS = 16
"""A larger fleet is simulated by so many of its replicas with their share of the arrivals: they
queue no less than all of them would.
"""
_LEAST_EACH = 40
"""Requests for each simulated replica, however few are asked for."""
_USUAL, _LEAST_USUAL = 1000, 200
_USUAL_STEPS = 100_000
"""Steps of all requests together: what is simulated in some seconds."""
_FILLING = 0.25
"""Share of the requests, the first ones, that fill the fleet and are not counted."""
_PARTS = 8

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds: the mean of ``count`` values and their 99th percentile. ``spread``: twice the
    standard error of the mean, from the means of consecutive parts of the run; None if too few.
    """

    count: int
    mean: float
    p99: float
    spread: float | None

    def above(self, bound: float) -> bool:
        """Whether the mean is above ``bound`` (seconds) by more than its spread."""
        return self.mean - (self.spread or 0.0) > bound

    def __str__(self) -> str:
        spread = "" if self.spread is None else f"± {in_ms(self.spread, 2)}, "
        return f"{in_ms(self.mean)} ms ({spread}p99 {in_ms(self.p99)}, of {self.count})"


@dataclass(frozen=True, slots=True)
class Checked:
    """What the simulation of ``simulated`` of a fleet's ``replicas`` served in ``requests``, not
    counting those that filled it. ``ttft`` of each kind, ``tpot`` of all tokens; None: it saw none.
    """

    replicas: int
    simulated: int
    requests: int
    ttft: tuple[Seen | None, ...]
    tpot: Seen | None

    def missed(self, objective: Objective, kinds: Sequence[Kind]) -> list[str]:
        """Which means are not within ``objective``, in words."""
        return [
            f"{what} {seen}, objective {in_ms(bound)} ms"
            for what, seen, bound in self._against(objective, kinds)
            if seen.mean > bound
        ]

    def nearly(self, objective: Objective, kinds: Sequence[Kind]) -> bool:
        """Whether ``objective`` is missed by less than the spread alone: chance decided."""
        return not self.meets(objective, kinds) and not any(
            seen.above(bound) for _, seen, bound in self._against(objective, kinds)
        )

    def verdict(self, objective: Objective, kinds: Sequence[Kind]) -> str:
        """Of this fleet, in words."""
        missed = "; ".join(self.missed(objective, kinds))
        if not missed:
            return "within the objective"
        less = " by less than the spread" if self.nearly(objective, kinds) else ""
        return f"missed{less}: {missed}"

    def _against(
        self, objective: Objective, kinds: Sequence[Kind]
    ) -> Iterator[tuple[str, Seen, float]]:
        """What was seen and is bounded: its name, and the bound in seconds."""
        for kind, seen in zip(kinds, self.ttft, strict=True):
            if seen is not None:
                yield f"TTFT of {kind}", seen, objective.ttft_bound(kind)
        if self.tpot is not None and objective.tpot_ms is not None:
            yield "TPOT", self.tpot, objective.tpot_ms / 1e3

    def meets(self, objective: Objective, kinds: Sequence[Kind]) -> bool:
        """Whether the means are within ``objective``."""
        return not self.missed(objective, kinds)


@dataclass(frozen=True, slots=True)
class Check:
    """What is simulated; ``requests`` at least. The same requests come to a fleet of any size."""

    curve: Curve
    commits: CommitLengths
    kinds: Sequence[Kind]
    limits: SchedulerOptions
    tokenizer: Tokenizer
    rate: float
    requests: int
    seed: int = 1

    def run(self, replicas: int, told: Callable[[float], None] = lambda _: None) -> Checked:
        """Simulate ``replicas``; ``told`` is called with the share that is done."""
        simulated = min(replicas, MOST_REPLICAS)
        count = max(self.requests, _LEAST_EACH * simulated)
        rate = self.rate * simulated / replicas
        drawn, jobs = poisson_jobs(self.kinds, rate, count, self.seed)
        fleet = Fleet([self._replica() for _ in range(simulated)], self.curve, self.commits)
        served = fleet.run(jobs, lambda done: told(done / count))
        return self._checked(replicas, simulated, drawn, served)

    def alone(self, told: Callable[[float], None] = lambda _: None) -> Checked:
        """The requests of the largest fleets, each alone on one replica: none is served better."""
        count = max(self.requests, _LEAST_EACH * MOST_REPLICAS)
        drawn, jobs = poisson_jobs(self.kinds, self.rate, count, self.seed)
        replica, served = self._replica(), []
        for number, job in enumerate(jobs):
            served += replica.run([replace(job, at=replica.now)])
            told((number + 1) / count)
        return self._checked(1, 1, drawn, served)

    def _replica(self) -> Offline:
        return Offline(self.curve, self.commits, self.limits, self.tokenizer)

    def _checked(
        self, replicas: int, simulated: int, drawn: Sequence[int], served: Sequence[Served]
    ) -> Checked:
        counted = list(zip(drawn, served, strict=True))[int(_FILLING * len(drawn)) :]
        parts = _parts(counted)
        ttft = tuple(
            summarize([[one.ttft for which, one in part if which == kind and one.ttft is not None]
                        for part in parts])
            for kind in range(len(self.kinds))
        )  # fmt: skip
        tpot = _tpot([[one for _, one in part] for part in parts])
        return Checked(replicas, simulated, len(counted), ttft, tpot)


def in_ms(seconds: float, digits: int = 4) -> str:
    """At least ``digits`` digits, and no exponent hides whole milliseconds."""
    milliseconds = seconds * 1e3
    whole = 10 ** (digits - 1) <= milliseconds < math.inf
    return f"{milliseconds:.0f}" if whole else f"{milliseconds:.{digits}g}"


def usual_requests(steps: float) -> int:
    """How many to simulate, if each takes ``steps`` decode steps."""
    return min(_USUAL, max(_LEAST_USUAL, round(_USUAL_STEPS / max(1.0, steps))))


def poisson_jobs(
    kinds: Sequence[Kind], rate: float, count: int, seed: int
) -> tuple[list[int], list[Job]]:
    """``count`` requests of the mix at ``rate`` a second: the number of each one's kind, and it."""
    random_, at = random.Random(seed), 0.0
    drawn = random_.choices(range(len(kinds)), [one.share for one in kinds], k=count)
    jobs = []
    for number, which in enumerate(drawn):
        at += random_.expovariate(rate)
        kind = kinds[which]
        jobs.append(
            Job(at, kind.prompt_tokens, kind.answer_tokens, kind.text, number, kind.cached_tokens)
        )
    return drawn, jobs


def _parts(items: Sequence[_Item]) -> list[Sequence[_Item]]:
    size = math.ceil(len(items) / _PARTS)
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def summarize(parts: Sequence[Sequence[float]]) -> Seen | None:
    """Of all values, which come in consecutive ``parts`` of a run; None if there are none."""
    values = sorted(value for part in parts for value in part)
    if not values:
        return None
    means = [statistics.fmean(part) for part in parts if part]
    return Seen(len(values), statistics.fmean(values), _p99(values), _spread(means))


def _tpot(parts: Sequence[Sequence[Served]]) -> Seen | None:
    """The mean over all tokens after an answer's first, the percentile over answers."""
    means, answers, all_seconds, all_tokens = [], [], 0.0, 0
    for part in parts:
        spans = [
            (one.end - one.ttft, one.job.answer_tokens - 1)
            for one in part
            if one.ttft is not None and one.end is not None and one.job.answer_tokens > 1
        ]
        seconds, tokens = sum(span for span, _ in spans), sum(count for _, count in spans)
        answers += [span / count for span, count in spans]
        all_seconds, all_tokens = all_seconds + seconds, all_tokens + tokens
        if tokens:
            means.append(seconds / tokens)
    if not all_tokens:
        return None
    return Seen(len(answers), all_seconds / all_tokens, _p99(sorted(answers)), _spread(means))


def _p99(values: Sequence[float]) -> float:
    return values[math.ceil(0.99 * len(values)) - 1]


def _spread(means: Sequence[float]) -> float | None:
    if len(means) < 2:
        return None
    return 2 * statistics.stdev(means) / math.sqrt(len(means))
