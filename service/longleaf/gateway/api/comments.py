"""Comment lines that keep a silent stream's connection alive."""

import asyncio
from collections.abc import Awaitable, Callable

COMMENT = b": waiting\n\n"


class Comments:
    """Sends a comment after each ``silence`` seconds without a byte, until ``stop``.

    ``said`` is told of every byte by the loop time; a timer for each of them would cost more than
    they do, so one timer looks now and then.
    """

    def __init__(self, silence: float, send: Callable[[], Awaitable[None]]) -> None:
        self._silence = silence
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.said = self._loop.time()
        """Loop time of the latest byte."""

    def start(self) -> None:
        """Begin to look."""
        self.said = self._loop.time()
        self._timer = self._loop.call_at(self.said + self._silence, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self.said + self._silence and (self._sending is None or self._sending.done()):
            self.said = now
            self._sending = self._loop.create_task(self._comment())
        self._timer = self._loop.call_at(self.said + self._silence, self._look)

    async def _comment(self) -> None:
        await self._send()

    def stop(self) -> None:
        """Send no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
