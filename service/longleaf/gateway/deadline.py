"""A call that comes at the end of its time, unless it is called off: most never come."""

import asyncio
from collections.abc import Callable


class Deadline:
    """At most one call at a time. ``close`` it at the end.

    Where the call is called off, or put off, its timer runs on and is looked at when it ends: each
    request has deadlines, and to start and stop a timer is a good part of what it costs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._then: Callable[[], None] | None = None
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ends = 0.0

    @property
    def armed(self) -> bool:
        """Whether a call is to come."""
        return self._then is not None

    def arm(self, seconds: float, then: Callable[[], None]) -> None:
        """Call ``then`` in ``seconds``; an earlier call is forgotten."""
        self.arm_at(self._loop.time() + seconds, then)

    def arm_at(self, due: float, then: Callable[[], None]) -> None:
        """Call ``then`` at loop time ``due``; an earlier call is forgotten."""
        self._due, self._then = due, then
        if self._timer is not None:
            if self._timer_ends <= due:
                return
            self._timer.cancel()
        self._start()

    def disarm(self) -> None:
        """Call nothing."""
        self._then = None

    def close(self) -> None:
        """Call nothing, and leave no timer."""
        self._then = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._timer_ends = self._due
        self._timer = self._loop.call_at(self._due, self._timer_over)

    def _timer_over(self) -> None:
        self._timer = None
        then = self._then
        if then is not None and self._due > self._timer_ends:
            self._start()
        elif then is not None:
            self._then = None
            then()
