"""The order of waiting requests."""

import pytest

from longleaf.gateway.admission.queue import FairQueue, Waiting
from longleaf.gateway.config import GatewayConfig


def one(
    name: str, key: str = "a", priority: int = 0, arrived: float = 0.0, cost: int = 100
) -> Waiting[str]:
    return Waiting(name, key, priority, arrived, cost)


def names(queue: FairQueue[str], now: float = 0.0) -> list[str]:
    return [waiting.item for waiting in queue.ordered(now)]


def offer(queue: FairQueue[str], waiting: Waiting[str]) -> Waiting[str] | None:
    queue.add(waiting)
    return queue.surplus(waiting)


def serve(queue: FairQueue[str], now: float = 0.0) -> str:
    first = queue.ordered(now)[0]
    queue.serve(first)
    return first.item


def test_first_come_first_served_within_a_key() -> None:
    queue: FairQueue[str] = FairQueue(10, 10**9, 10.0)
    for name in "abc":
        offer(queue, one(name))
    assert [serve(queue) for _ in range(3)] == ["a", "b", "c"]
    assert len(queue) == 0


def test_a_key_with_many_does_not_push_back_a_key_with_few() -> None:
    queue: FairQueue[str] = FairQueue(100, 10**9, 1e9)
    for number in range(20):
        offer(queue, one(f"many{number}", key="many"))
    assert serve(queue) == "many0"
    offer(queue, one("few0", key="few"))
    offer(queue, one("few1", key="few"))
    served = [serve(queue) for _ in range(5)]
    assert served == ["few0", "many1", "few1", "many2", "many3"]


def test_shares_are_equal_in_tokens_not_in_requests() -> None:
    queue: FairQueue[str] = FairQueue(1000, 10**9, 1e9)
    for number in range(100):
        offer(queue, one(f"l{number}", key="long", cost=1000))
        offer(queue, one(f"s{number}", key="short", cost=100))
    served = [serve(queue) for _ in range(110)]
    assert sum(name.startswith("l") for name in served) == pytest.approx(10, abs=2)


def test_a_key_that_was_away_gets_no_credit_for_it() -> None:
    queue: FairQueue[str] = FairQueue(100, 10**9, 1e9)
    for number in range(10):
        offer(queue, one(f"a{number}", key="a"))
    for _ in range(9):
        serve(queue)
    for number in range(5):
        offer(queue, one(f"b{number}", key="b"))
    offer(queue, one("a10", key="a"))
    assert [serve(queue) for _ in range(5)] == ["b0", "a9", "b1", "b2", "a10"]


def test_priority_comes_first_and_age_catches_up() -> None:
    queue: FairQueue[str] = FairQueue(10, 10**9, 10.0)
    offer(queue, one("old", priority=0, arrived=0.0))
    offer(queue, one("urgent", priority=2, arrived=19.0))
    assert names(queue, now=19.9) == ["urgent", "old"]
    assert names(queue, now=20.0) == ["old", "urgent"]  # two intervals of waiting: as urgent
    offer(queue, one("batch", priority=-5, arrived=0.0))
    assert names(queue, now=25.0)[-1] == "batch"
    assert names(queue, now=1000.0)[-1] == "batch"
    offer(queue, one("new", priority=0, arrived=1000.0))
    assert names(queue, now=1000.0)[-1] == "new"  # in the end everyone gets a turn


def test_within_the_time_that_it_may_wait_a_low_key_comes_before_new_ones() -> None:
    config = GatewayConfig(replicas=("http://a:1",))
    queue: FairQueue[str] = FairQueue(10, 10**9, config.aging_interval)
    offer(queue, one("batch", key="b", priority=-5, arrived=0.0))
    offer(queue, one("new", priority=0, arrived=config.queue_timeout / 2))
    assert names(queue, config.queue_timeout / 2) == ["batch", "new"]


def test_a_full_queue_refuses_whoever_holds_most_of_it() -> None:
    queue: FairQueue[str] = FairQueue(4, 10**9, 10.0)
    for name in "wxyz":
        assert offer(queue, one(name, key="greedy")) is None
    again = one("again", key="greedy")
    assert offer(queue, again) is again
    victim = offer(queue, one("modest", key="modest"))
    assert victim is not None
    assert victim.item == "z"  # the last of those that hold most
    victim = offer(queue, one("modest2", key="modest"))
    assert victim is not None
    assert victim.item == "y"
    third = one("modest3", key="modest")
    assert offer(queue, third) is third  # two and two: equal shares
    assert sorted(names(queue)) == ["modest", "modest2", "w", "x"]


def test_no_room_at_all() -> None:
    queue: FairQueue[str] = FairQueue(0, 10**9, 10.0)
    waiting = one("a")
    assert offer(queue, waiting) is waiting
    assert len(queue) == 0


def test_what_was_refused_does_not_count_as_service() -> None:
    queue: FairQueue[str] = FairQueue(2, 10**9, 1e9)
    for key in "ab":
        offer(queue, one(f"{key}0", key=key))
    for _ in range(50):
        refused = one("refused", key="c")
        assert offer(queue, refused) is refused
    assert [serve(queue), serve(queue)] == ["a0", "b0"]
    for key in "cd":
        offer(queue, one(f"{key}0", key=key))
    assert names(queue) == ["c0", "d0"]


def test_those_before_a_newcomer_are_those_that_would_be_served_first() -> None:
    for key, priority in (("a", 0), ("b", 0), ("c", 0), ("a", 3), ("c", -3)):
        queue: FairQueue[str] = FairQueue(100, 10**9, 10.0)
        for number in range(6):
            offer(queue, one(f"a{number}", key="a", arrived=number * 10.0))
            offer(queue, one(f"b{number}", key="b", priority=number % 3, arrived=25.0, cost=300))
        serve(queue, 50.0)
        before = {waiting.item for waiting in queue.before(key, priority, 60.0)}
        offer(queue, one("new", key=key, priority=priority, arrived=60.0))
        everyone = names(queue, 60.0)
        assert before == set(everyone[: everyone.index("new")])


def test_shares_hold_however_long_everyone_waits() -> None:
    config = GatewayConfig(replicas=("http://a:1",))
    queue: FairQueue[str] = FairQueue(512, 10**9, config.aging_interval)
    waits: list[float] = []
    for now in range(1, 120):  # 20 a second of one key, one a second of another; 5 are served
        for number in range(20):
            offer(queue, one(f"{now}.{number}", key="many", arrived=float(now)))
        offer(queue, one("few", key="few", arrived=float(now)))
        for _ in range(5):
            first = queue.ordered(float(now))[0]
            queue.serve(first)
            if first.key == "few":
                waits.append(now - first.arrived)
    assert len(waits) == 119
    assert max(waits) == 0.0


def test_what_was_pushed_out_or_left_does_not_count_as_service() -> None:
    queue: FairQueue[str] = FairQueue(8, 10**9, 1e9)
    left = [one(f"left{number}", key="a") for number in range(2)]
    for waiting in left:
        offer(queue, waiting)
    for number in range(6):
        offer(queue, one(f"a{number}", key="a"))
    for number in range(4):
        offer(queue, one(f"b{number}", key="b"))  # pushes out the last of a: a5, a4, a3, a2
    for waiting in left:
        queue.remove(waiting)
    assert names(queue) == ["a0", "b0", "a1", "b1", "b2", "b3"]
    offer(queue, one("a6", key="a"))
    assert names(queue) == ["a0", "b0", "a1", "b1", "b2", "a6", "b3"]


def test_leaving_twice_is_once() -> None:
    queue: FairQueue[str] = FairQueue(4, 10**9, 10.0)
    waiting = one("a")
    offer(queue, waiting)
    assert queue.remove(waiting)
    assert not queue.remove(waiting)
    assert len(queue) == 0


def test_bodies_that_wait_are_bounded_together() -> None:
    queue: FairQueue[str] = FairQueue(10, 1_000, 10.0)
    large, small = (Waiting(name, "a", 0, 0.0, 1, size) for name, size in (("l", 900), ("s", 101)))
    assert offer(queue, large) is None
    assert offer(queue, small) is small
    queue.remove(large)
    assert offer(queue, small) is None
