"""Replicas behind one gateway, without waiting: all arrivals are one stream."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longleaf.simulate.commits import CommitLengths
from longleaf.simulate.curve import Curve
from longleaf.simulate.offline import Job, Offline, Served

_COMPARED = 8
"""Replicas whose costs are compared, those with the least prompts ahead: the gateway does so."""
_MOST_OVERTAKES = 32
"""The gateway's default."""


@dataclass(slots=True)
class _Waiting:
    served: Served
    overtaken: int = 0


class Fleet:
    """Gives each job to the replica where it is expected to cost the least time, among those whose
    sequences and KV pool have room; while none has, the job waits at the gateway.

    Cost, as the gateway reckons it but from the curve itself: the prompts ahead, the job's steps
    among the answers that run there, and what these steps add to theirs. A job that waits may be
    overtaken by others that have room, a number of times.
    """

    def __init__(self, replicas: Sequence[Offline], curve: Curve, commits: CommitLengths) -> None:
        self._replicas = replicas
        self._curve = curve
        self._commits = commits
        self._waiting: list[_Waiting] = []

    def run(
        self, jobs: Sequence[Job], told: Callable[[int], None] = lambda _: None
    ) -> list[Served]:
        """Serve ``jobs``, given in order of their arrival, to the end of the last one. ``told`` is
        called with the number of those that have come.
        """
        served = [Served(job) for job in jobs]
        for number, one in enumerate(served, 1):
            at = one.job.at
            self._advance(at)
            self._waiting.append(_Waiting(one))
            self._place(self._replicas, at)
            told(number)
        self._advance(math.inf)
        return served

    def _advance(self, until: float) -> None:
        """Run all steps that begin before ``until``; who waits takes the room that answers leave
        when they end.
        """
        while self._waiting:
            replica = min((one for one in self._replicas if not one.idle), key=lambda one: one.now)
            if replica.now >= until:
                break
            running = len(replica.contexts)
            replica.step()
            if len(replica.contexts) < running:
                self._place([replica], replica.now)
        for replica in self._replicas:
            replica.advance(until)

    def _place(self, replicas: Sequence[Offline], at: float) -> None:
        """Give those of ``replicas`` that have room to who waits, in order."""
        held: list[_Waiting] = []
        for waiting in self._waiting:
            roomy = [one for one in replicas if one.has_room(waiting.served.job)]
            if not roomy or (held and max(one.overtaken for one in held) >= _MOST_OVERTAKES):
                held.append(waiting)
                continue
            for one in held:
                one.overtaken += 1
            self._cheapest(roomy, waiting.served.job, at).add(waiting.served, at)
        self._waiting = held

    def _cheapest(self, roomy: Sequence[Offline], job: Job, at: float) -> Offline:
        ahead = {one: one.prompts_ahead(at) for one in roomy}
        few = heapq.nsmallest(_COMPARED, ahead, lambda one: ahead[one])
        return min(few, key=lambda one: ahead[one] + self._decode_cost(one.contexts, job))

    def _decode_cost(self, contexts: Sequence[int], job: Job) -> float:
        """Seconds of the job's own steps, and what they add to others'."""
        commit_len = self._commits.mean(job.text) if self._curve.nodes > 1 else 1.0
        own = job.prompt_tokens + job.answer_tokens // 2
        after = self._curve.step_seconds([*contexts, own])
        slowed = max(0.0, after - self._curve.step_seconds(contexts)) if contexts else 0.0
        return (job.answer_tokens - 1) / commit_len * (after + len(contexts) * slowed)
