"""Deadlines: one call, at the latest time that was set, and none that was called off."""

import asyncio
from collections.abc import Callable

import pytest

from longleaf.gateway.deadline import Deadline

pytestmark = pytest.mark.anyio


class Calls:
    """What was called, in order; ``last`` is done with the call of that name."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.names: list[str] = []
        self.last: asyncio.Future[float] = self.loop.create_future()

    def __call__(self, name: str) -> Callable[[], None]:
        """A call to wait for."""

        def call() -> None:
            self.names.append(name)
            if name == "last":
                self.last.set_result(self.loop.time())

        return call


async def test_a_call_that_is_put_off_comes_at_the_later_time_alone() -> None:
    calls = Calls()
    deadline = Deadline(calls.loop)
    deadline.arm(0.02, calls("first"))
    due = calls.loop.time() + 0.1
    deadline.arm_at(due, calls("last"))
    assert await calls.last >= due - 0.001
    assert calls.names == ["last"]
    assert not deadline.armed


async def test_an_earlier_time_counts_at_once() -> None:
    calls = Calls()
    deadline = Deadline(calls.loop)
    deadline.arm(3600, calls("first"))
    deadline.arm(0.02, calls("last"))
    await calls.last
    assert calls.names == ["last"]


async def test_what_is_called_off_never_comes() -> None:
    calls = Calls()
    off, closed, marker = (Deadline(calls.loop) for _ in range(3))
    off.arm(0.01, calls("off"))
    off.disarm()
    closed.arm(0.01, calls("closed"))
    closed.close()
    assert not off.armed
    assert not closed.armed
    marker.arm(0.05, calls("last"))
    await calls.last
    assert calls.names == ["last"]


async def test_it_serves_again_after_its_call() -> None:
    calls = Calls()
    deadline = Deadline(calls.loop)

    def again() -> None:
        calls("first")()
        deadline.arm(0.01, calls("last"))

    deadline.arm(0.01, again)
    await calls.last
    assert calls.names == ["first", "last"]
