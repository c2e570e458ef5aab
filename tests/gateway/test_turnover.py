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
    assert turnover.tokens_per_second(short=True, tokens=200) == pytest.approx(200 / 2.2)
    assert turnover.tokens_per_second(short=False, tokens=1) == pytest.approx(4000 / 3.0)


def test_it_looks_back_at_as_much_as_waits_now() -> None:
    """The queue filled up: what was fast before counts where little waits, not where much does."""
    clock = Clock()
    turnover = Turnover(clock)
    turnover.note({True})
    for seconds, turns in ((0.1, 60), (1.0, 40)):
        for _ in range(turns):
            clock.now += seconds
            turnover.served(short=True, tokens=100)
    rates = [turnover.tokens_per_second(short=True, tokens=100 * n) for n in (1, 32, 40, 50, 100)]
    assert rates == pytest.approx([100, 100, 100, 5000 / 41, 10_000 / 46])


def test_old_turns_are_forgotten() -> None:
    clock = Clock()
    turnover = Turnover(clock)
    turnover.note({False})
    for seconds in (1.0, 2.0):
        for _ in range(1024):
            clock.now += seconds
            turnover.served(short=False, tokens=10)
    assert turnover.tokens_per_second(short=False, tokens=1 << 40) == pytest.approx(5.0)


def test_a_rate_needs_a_few_turns() -> None:
    clock = Clock()
    turnover = Turnover(clock)
    turnover.note({False})
    for turns in range(4):
        assert (turnover.tokens_per_second(short=False, tokens=10) is None) is (turns < 3)
        clock.now += 1.0
        turnover.note({False})
        turnover.served(short=False, tokens=10)
    assert turnover.tokens_per_second(short=True, tokens=10) is None
