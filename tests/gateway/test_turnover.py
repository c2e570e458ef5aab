import pytest

from longleaf.gateway.admission.turnover import Turnover


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_class_has_the_rate_of_the_time_that_it_waited() -> None:
    clock = Clock()
    turnover = Turnover(clock)
    turnover.note({True, False})
    for _ in range(4):
        clock.now += 0.5
        turnover.note({True, False})
        turnover.served(short=False, tokens=1000)
        turnover.served(short=True, tokens=50)
    clock.now += 0.2
    turnover.note({False})  # no short one waits any more
    clock.now += 0.8
    turnover.note(set())
    clock.now += 60  # nobody waits: no time for either
    turnover.note({True})
    assert turnover.tokens_per_second(short=True) == pytest.approx(200 / 2.2, rel=0.03)
    assert turnover.tokens_per_second(short=False) == pytest.approx(4000 / 3.0, rel=0.03)


def test_a_rate_needs_a_few_turns() -> None:
    clock = Clock()
    turnover = Turnover(clock)
    turnover.note({False})
    for turns in range(4):
        assert (turnover.tokens_per_second(short=False) is None) is (turns < 3)
        clock.now += 1.0
        turnover.note({False})
        turnover.served(short=False, tokens=10)
    assert turnover.tokens_per_second(short=True) is None
