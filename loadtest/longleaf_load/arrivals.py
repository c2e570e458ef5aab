"""When requests arrive: an open loop, which does not wait for answers.

A phase goes from one rate to another (the same for a step), with gaps that are gamma distributed:
``burst`` is their squared coefficient of variation, so 1 is a Poisson process, more comes in
bursts, less is more regular, 0 is a clock.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """``rate`` and ``end_rate``: requests a second at its beginning and its end."""

    name: str
    seconds: float
    rate: float
    end_rate: float
    burst: float = 1.0

    @property
    def expected(self) -> float:
        """Requests that arrive on average."""
        return self.seconds * (self.rate + self.end_rate) / 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """``at``: seconds since the start. ``number`` counts all arrivals; ``phase`` is an index."""

    number: int
    at: float
    phase: int


def arrivals(phases: Sequence[Phase], seed: int) -> Iterator[Arrival]:
    """All arrivals of ``phases``, in order; the same for the same seed."""
    random_ = random.Random(f"arrivals {seed}")
    number, begin = 0, 0.0
    for index, phase in enumerate(phases):
        for load in _gaps(phase, random_):
            yield Arrival(number, begin + _time_of(phase, load), index)
            number += 1
        begin += phase.seconds


def _gaps(phase: Phase, random_: random.Random) -> Iterator[float]:
    """Positions of arrivals in expected requests since the phase began: gaps have mean 1."""
    at = 0.0
    while True:
        gap = 1.0 if phase.burst == 0 else random_.gammavariate(1 / phase.burst, phase.burst)
        at += gap
        if at >= phase.expected:
            return
        yield at


def _time_of(phase: Phase, load: float) -> float:
    """When ``load`` requests are expected to have arrived: the rate is linear in time."""
    slope = (phase.end_rate - phase.rate) / phase.seconds
    if abs(slope) < 1e-12:
        return load / phase.rate
    root = math.sqrt(max(0.0, phase.rate**2 + 2 * slope * load))
    return (root - phase.rate) / slope
