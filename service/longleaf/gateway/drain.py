"""Draining: no new work, running answers finish, up to a limit."""

import asyncio
from types import TracebackType
from typing import Any


class Drain:
    """Counts running requests, each of which enters it, and knows whether new ones may come. Made
    inside the event loop.
    """

    def __init__(self) -> None:
        self._running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.expired: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when running answers must end now."""

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._draining

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return self._running

    def __enter__(self) -> None:
        """One more request runs."""
        self._running += 1
        self._idle.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """It has ended."""
        self._running -= 1
        if not self._running:
            self._idle.set()

    def begin(self) -> None:
        """Refuse new work from now on."""
        self._draining = True

    def expire(self) -> None:
        """End running answers now: each tells its client and stops its replica."""
        if not self.expired.done():
            self.expired.set_result(None)

    async def finish(self, limit: float, grace: float = 5.0) -> bool:
        """Wait until nothing runs; after ``limit`` seconds end what is left.

        True if everything finished by itself.
        """
        try:
            async with asyncio.timeout(limit):
                await self._wait_idle_or_expired()
        except TimeoutError:
            self.expire()
        finished = not self.expired.done()
        if not finished:
            try:
                async with asyncio.timeout(grace):
                    await self._idle.wait()
            except TimeoutError:
                return False
        return finished

    async def _wait_idle_or_expired(self) -> None:
        idle = asyncio.create_task(self._idle.wait())
        try:
            either: set[asyncio.Future[Any]] = {idle, self.expired}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
