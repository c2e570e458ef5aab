"""Load figures: sums that gateways compute with."""

import pytest

from longleaf.ddtree import StepOutcome
from longleaf.embedded.loads import LoadCounters


def test_throughput_is_of_the_last_ten_seconds() -> None:
    now = 100.0
    counters = LoadCounters(lambda: now)
    assert counters.throughput == 0.0
    counters.add_step(2, 0.01, 8)
    now += 6
    counters.add_step(2, 0.03, 4)
    assert counters.throughput == pytest.approx(1.2)
    now += 6
    assert counters.throughput == pytest.approx(0.4)
    assert counters.moments == pytest.approx([2, 4, 40_000, 8, 80_000, 12])


def test_acceptance_is_over_speculating_steps() -> None:
    counters = LoadCounters()
    assert (counters.accept_length, counters.accept_rate, counters.cache_hit_rate) == (0, 0, 0)
    counters.add_outcome(StepOutcome(3, 3, 4), 16)
    counters.add_outcome(StepOutcome(0, 0, 1), 8)
    assert counters.accept_length == 2.5
    assert counters.accept_rate == 3 / 24
