"""The smallest fleet that meets an objective in simulation, from the formulas' answer on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from longleaf.capacity.check import Checked
from longleaf.capacity.model import Objective
from longleaf.capacity.traffic import Kind

_GROWTH = 1.3
_MOST_TIMES = 8
"""A fleet so many times larger than the formulas' that still misses will not meet by growing."""


@dataclass(frozen=True, slots=True)
class Found:
    """``tried``: every fleet that was simulated, by its size. ``answer``: the smallest that met, or
    the largest one if none did. ``alone``: requests that met no other, if the first fleet missed.
    """

    formulas: int
    tried: tuple[Checked, ...]
    answer: Checked
    alone: Checked | None = None

    def nearly(self, objective: Objective, kinds: Sequence[Kind]) -> list[int]:
        """Sizes below the answer that missed by less than the spread, from the answer down."""
        if not self.answer.meets(objective, kinds):
            return []
        smaller = [one for one in self.tried if one.replicas < self.answer.replicas]
        near = takewhile(lambda one: one.nearly(objective, kinds), reversed(smaller))
        return sorted(one.replicas for one in near)


def search(
    simulate: Callable[[int], Checked],
    alone: Callable[[], Checked],
    formulas: int,
    objective: Objective,
    kinds: Sequence[Kind],
) -> Found:
    """Begin with ``formulas`` replicas and never answer fewer: the utilization that was asked for
    is planned by them. While the simulation misses, grow by 30 %, then halve the distance between
    the last fleet that missed and the first one that met. No fleet is grown for what requests miss
    that are ``alone``.
    """
    tried = {formulas: simulate(formulas)}
    lone = None
    if not tried[formulas].meets(objective, kinds):
        lone = alone()
        if not lone.meets(objective, kinds):
            return Found(formulas, (tried[formulas],), tried[formulas], lone)

    def met(replicas: int) -> bool:
        if replicas not in tried:
            tried[replicas] = simulate(replicas)
        return tried[replicas].meets(objective, kinds)

    missing, meeting = formulas - 1, formulas
    while not met(meeting) and meeting < formulas * _MOST_TIMES:
        missing, meeting = meeting, max(meeting + 1, math.ceil(meeting * _GROWTH))
    while met(meeting) and meeting - missing > 1:
        middle = (missing + meeting) // 2
        if met(middle):
            meeting = middle
        else:
            missing = middle
    return Found(formulas, tuple(tried[size] for size in sorted(tried)), tried[meeting], lone)
