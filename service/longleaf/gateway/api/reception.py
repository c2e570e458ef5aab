"""Memory for the bodies that are being received, all clients together."""

import asyncio
from collections import deque
from typing import Final

FREE_BYTES: Final = 256 * 1024
"""Of a body, which take no place: no more of it comes before it has one."""


class ReceptionFullError(Exception):
    """No place came free in time."""


class Reception:
    """Gives places for long bodies, ``limit`` bytes together, in the order in which they asked.

    A body asks once, for all that may come of it: those that have a place can always be read to
    their end. The client of one that waits is made to wait.
    """

    def __init__(self, limit: int, patience: float) -> None:
        self._free = limit
        self._patience = patience
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Return with a place of ``size`` bytes; ``free`` must follow.

        ``ReceptionFullError`` after ``patience`` seconds. Cancelling it leaves nothing behind.
        """
        if size <= self._free and not self._waiting:
            self._free -= size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = size, turn
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._patience):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.free(size)
            elif place in self._waiting:
                self._waiting.remove(place)
                self.free(0)
            if isinstance(error, TimeoutError):
                raise ReceptionFullError from None
            raise

    def free(self, size: int) -> None:
        """Give a place back."""
        self._free += size
        while self._waiting and self._waiting[0][0] <= self._free:
            size, turn = self._waiting.popleft()
            if not turn.done():  # else it is about to leave
                self._free -= size
                turn.set_result(None)


class Place:
    """That of one body; none until it is found to be long. Give it back in any case."""

    __slots__ = ("_reception", "_size")

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        self._size = 0

    @property
    def taken(self) -> bool:
        """Whether it has one."""
        return self._size > 0

    async def take(self, size: int) -> None:
        """Get one of ``size`` bytes, once. ``ReceptionFullError``."""
        await self._reception.take(size)
        self._size = size

    def give_back(self) -> None:
        """It is needed no more."""
        if self._size:
            self._reception.free(self._size)
            self._size = 0
