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


def serve(queue: FairQueue[str], now: float = 0.0) -> str:
    first = queue.ordered(now)[0]
    queue.serve(first)
    return first.item


def test_first_come_first_served_within_a_key() -> None:
    queue: FairQueue[str] = FairQueue(10, 10**9, 10.0)
    for name in "abc":
        queue.offer(one(name))
    assert [serve(queue) for _ in range(3)] == ["a", "b", "c"]
    assert len(queue) == 0


def test_a_key_with_many_does_not_push_back_a_key_with_few() -> None:
    queue: FairQueue[str] = FairQueue(100, 10**9, 1e9)
    for number in range(20):
        queue.offer(one(f"many{number}", key="many"))
    assert serve(queue) == "many0"
    queue.offer(one("few0", key="few"))
    queue.offer(one("few1", key="few"))
    served = [serve(queue) for _ in range(5)]
    assert served == ["few0", "many1", "few1", "many2", "many3"]


def test_shares_are_equal_in_tokens_not_in_requests() -> None:
    queue: FairQueue[str] = FairQueue(1000, 10**9, 1e9)
    for number in range(100):
        queue.offer(one(f"l{number}", key="long", cost=1000))
        queue.offer(one(f"s{number}", key="short", cost=100))
    served = [serve(queue) for _ in range(110)]
    assert sum(name.startswith("l") for name in served) == pytest.approx(10, abs=2)


def test_a_key_that_was_away_gets_no_credit_for_it() -> None:
    queue: FairQueue[str] = FairQueue(100, 10**9, 1e9)
    for number in range(10):
        queue.offer(one(f"a{number}", key="a"))
    for _ in range(9):
        serve(queue)
    for number in range(5):
        queue.offer(one(f"b{number}", key="b"))
    queue.offer(one("a10", key="a"))
    assert [serve(queue) for _ in range(5)] == ["b0", "a9", "b1", "b2", "a10"]


def test_priority_comes_first_and_age_catches_up() -> None:
    queue: FairQueue[str] = FairQueue(10, 10**9, 10.0)
    queue.offer(one("old", priority=0, arrived=0.0))
    queue.offer(one("urgent", priority=2, arrived=19.0))
    assert names(queue, now=19.9) == ["urgent", "old"]
    assert names(queue, now=20.0) == ["old", "urgent"]  # two intervals of waiting: as urgent
    queue.offer(one("batch", priority=-5, arrived=0.0))
    assert names(queue, now=25.0)[-1] == "batch"
    assert names(queue, now=1000.0)[-1] == "batch"
    queue.offer(one("new", priority=0, arrived=1000.0))
    assert names(queue, now=1000.0)[-1] == "new"  # in the end everyone gets a turn


def test_within_the_time_that_it_may_wait_a_low_key_comes_before_new_ones() -> None:
    config = GatewayConfig(replicas=("http://a:1",))
    queue: FairQueue[str] = FairQueue(10, 10**9, config.aging_interval)
    queue.offer(one("batch", key="b", priority=-5, arrived=0.0))
    queue.offer(one("new", priority=0, arrived=config.queue_timeout / 2))
    assert names(queue, config.queue_timeout / 2) == ["batch", "new"]


def test_a_full_queue_refuses_whoever_holds_most_of_it() -> None:
    queue: FairQueue[str] = FairQueue(4, 10**9, 10.0)
    for name in "wxyz":
        assert queue.offer(one(name, key="greedy")) is None
    again = one("again", key="greedy")
    assert queue.offer(again) is again
    victim = queue.offer(one("modest", key="modest"))
    assert victim is not None
    assert victim.item == "z"  # the last of those that hold most
    victim = queue.offer(one("modest2", key="modest"))
    assert victim is not None
    assert victim.item == "y"
    third = one("modest3", key="modest")
    assert queue.offer(third) is third  # two and two: equal shares
    assert sorted(names(queue)) == ["modest", "modest2", "w", "x"]


def test_no_room_at_all() -> None:
    queue: FairQueue[str] = FairQueue(0, 10**9, 10.0)
    waiting = one("a")
    assert queue.offer(waiting) is waiting
    assert len(queue) == 0


def test_leaving_twice_is_once() -> None:
    queue: FairQueue[str] = FairQueue(4, 10**9, 10.0)
    waiting = one("a")
    queue.offer(waiting)
    assert queue.remove(waiting)
    assert not queue.remove(waiting)
    assert len(queue) == 0


def test_bodies_that_wait_are_bounded_together() -> None:
    queue: FairQueue[str] = FairQueue(10, 1_000, 10.0)
    large, small = (Waiting(name, "a", 0, 0.0, 1, size) for name, size in (("l", 900), ("s", 101)))
    assert queue.offer(large) is None
    assert queue.offer(small) is small
    queue.remove(large)
    assert queue.offer(small) is None
