"""The smallest fleet that meets an objective in simulation, from the formulas' answer on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from longleaf.capacity.check import MOST_REPLICAS, Checked
from longleaf.capacity.model import CapacityError, Objective
from longleaf.capacity.traffic import Kind

_GROWTH = 1.3
_MOST_TIMES = 8
"""A fleet so many times larger than the formulas' that still misses will not meet by growing."""


@dataclass(frozen=True, slots=True)
class Found:
    """``tried``: every fleet that was simulated, by its size. ``answer``: the smallest that met, or
    the largest one if none did.
    """

    formulas: int
    tried: tuple[Checked, ...]
    answer: Checked

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
    the last fleet that missed and the first one that met. ``CapacityError`` if requests miss that
    are ``alone``, which are simulated before a large fleet, and before a small one grows.
    """
    large = formulas > MOST_REPLICAS
    if large:
        _check_alone(alone(), objective, kinds)
    tried = {formulas: simulate(formulas)}
    if not large and not tried[formulas].meets(objective, kinds):
        _check_alone(alone(), objective, kinds)

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
    return Found(formulas, tuple(tried[size] for size in sorted(tried)), tried[meeting])


def _check_alone(alone: Checked, objective: Objective, kinds: Sequence[Kind]) -> None:
    if not alone.meets(objective, kinds):
        raise CapacityError(
            "no fleet meets the objective in simulation, for a request alone on a replica "
            + alone.verdict(objective, kinds)
        )
