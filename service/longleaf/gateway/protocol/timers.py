"""What ends a connection that does nothing: slow readers, clients that have left."""

import asyncio
from collections.abc import Callable, Sequence

from longleaf.gateway.deadline import Deadline


class SlowReader:
    """Aborts a transport whose peer has read nothing of what was sent for ``limit`` seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float) -> None:
        self._limit = limit
        self._deadline = Deadline(loop)

    def watch(self, transport: asyncio.Transport) -> None:
        """Begin; what runs already goes on."""
        if not self._deadline.armed:
            self._look_later(transport)

    def stop(self) -> None:
        """It reads."""
        self._deadline.close()

    def _look_later(self, transport: asyncio.Transport) -> None:
        size = transport.get_write_buffer_size()
        self._deadline.arm(self._limit, lambda: self._look(transport, size))

    def _look(self, transport: asyncio.Transport, before: int) -> None:
        if transport.get_write_buffer_size() < before:
            self._look_later(transport)
        else:
            transport.abort()


class Probes:
    """Calls ``probe`` after each of ``pauses``, then again and again after the last one."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pauses: Sequence[float],
        probe: Callable[[], None],
    ) -> None:
        self._pauses = pauses
        self._probe = probe
        self._deadline = Deadline(loop)

    def start(self, number: int = 0) -> None:
        """Begin with the first pause."""
        self._deadline.arm(self._pauses[number], lambda: self._next(number))

    def stop(self) -> None:
        """No more."""
        self._deadline.close()

    def _next(self, number: int) -> None:
        self.start(min(number + 1, len(self._pauses) - 1))
        self._probe()
