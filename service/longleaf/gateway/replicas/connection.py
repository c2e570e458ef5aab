"""One HTTP/1.1 connection to a replica: one exchange at a time, bytes as they come.

A relay's upstream side costs little only where nothing stands between the parser and the relay:
what the socket brings in one piece is handed on in one piece.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal, cast

import httptools

from longleaf.gateway.deadline import Deadline

FailureKind = Literal[
    "connect",
    "disconnected",
    "first_byte_timeout",
    "idle_timeout",
    "bad_answer",
    "ended_early",
    "hung",
]

Body = Sequence[bytes | memoryview]
"""A body in parts, in order."""

RawHeaders = list[tuple[bytes, bytes]]

_WRITE_BYTES = 256 * 1024
"""Written at a time: a long body must not hold up the event loop."""
_HELD_BYTES = 64 * 1024
_PIECE_BYTES = 16 * 1024
"""Handed on at a time where that much is held, or a chunk, where that is longer."""
"""Unread bytes above which the replica is made to wait (back-pressure)."""
_HEAD_BYTES = 256 * 1024
_BODILESS = frozenset({204, 304})
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class ReplicaError(Exception):
    """An exchange with a replica that did not end in a whole answer."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Connection(asyncio.Protocol):
    """Made by ``loop.create_connection``. Use: ``ask``, ``read`` until ``b""``, or until ``over``.

    After that ``reusable`` tells whether another exchange may follow. ``close`` ends it at once.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.status = 0
        self.headers: RawHeaders = []
        """Lower-case names, in order."""
        self.asked = 0.0
        """Loop time since when the reader has been waiting."""
        self.reused = False
        """Whether an earlier exchange ran on it."""
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()
        self.deadline = Deadline(self._loop)
        """For whoever has an exchange on it."""
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._asked = False
        """Whether there has been an exchange."""
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._head_bytes = 0
        self._error: ReplicaError | None = None
        self._head_done = self._ended = self._framed = False
        self._kept = False
        self._sending = self._write_paused = self._read_paused = False

    @property
    def lost(self) -> bool:
        """Whether the connection is gone."""
        return self._transport is None or self._transport.is_closing()

    @property
    def answered(self) -> bool:
        """Whether any of the answer has come."""
        return self.status > 0

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for the replica now."""
        return self._reader is not None

    @property
    def reusable(self) -> bool:
        """Whether the exchange has ended in order and the replica keeps the connection."""
        ended = self._ended and self._framed and not self._sending and self._error is None
        return ended and self._kept and not self._read_paused and not self.lost

    @property
    def over(self) -> bool:
        """Whether all of the answer was read."""
        return self._ended and not self._held

    async def ask(self, head: bytes, body: Body, size: int) -> None:
        """Send a request, its body ``size`` bytes; returns when the answer's ``status`` and
        ``headers`` are there. ``ReplicaError``.
        """
        self.reused, self._asked = self._asked, True
        self.status, self.headers = 0, []
        self._head_done = self._ended = self._framed = False
        self._head_bytes = self._held_bytes = 0
        self._held.clear()
        if self._transport is None:
            raise self._error or self._disconnected(None)
        if size <= _WRITE_BYTES:
            self._transport.write(b"".join((head, *body)))
        else:
            await self._send(self._transport, head, body)
        while not self._head_done:
            if self._error is not None:
                raise self._error
            await self._until_something()

    async def _send(self, transport: asyncio.Transport, head: bytes, body: Body) -> None:
        """Send a long request in parts, until it is on its way, or answered."""
        self._sending = True
        transport.write(head)
        for part in body:
            whole = memoryview(part)
            for start in range(0, len(whole), _WRITE_BYTES):
                await self._until_writable()
                if self._head_done or self._error is not None:
                    return
                transport.write(whole[start : start + _WRITE_BYTES])
        self._sending = False

    async def read(self) -> bytes:
        """What has come of the body, as soon as there is any; ``b""`` at its end.

        ``ReplicaError`` where it was cut, after what had come before.
        """
        while not self._held:
            if self._ended:
                return b""
            if self._error is not None:
                raise self._error
            await self._until_something()
        if self._held_bytes > _HELD_BYTES:
            data = self._part_of_held()
        else:
            data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held.clear()
            self._held_bytes = 0
        if self._read_paused and self._held_bytes <= _HELD_BYTES and self._transport is not None:
            self._read_paused = False
            self._transport.resume_reading()
        return data

    def _part_of_held(self) -> bytes:
        """The first of what a slow reader has left, so that no piece of it grows long."""
        size = parts = 0
        while size < _PIECE_BYTES:
            size += len(self._held[parts])
            parts += 1
        data = b"".join(self._held[:parts])
        del self._held[:parts]
        self._held_bytes -= size
        return data

    def fail(self, error: ReplicaError) -> None:
        """Give up on the exchange: its reader gets ``error``."""
        if self._error is None and not self._ended:
            self._error = error
            self._wake()

    def close(self) -> None:
        """End the connection; what is still to be sent is thrown away."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._transport = None
        self.deadline.close()
        if self._head_done and not self._framed and error is None:
            self._ended = True
        elif not self._ended and self._error is None:
            self._error = self._disconnected(error)
        self._wake()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if not self._asked or self._ended:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(ReplicaError("bad_answer", f"{self.url} did not answer in HTTP: {error}"))
            self.close()
            return
        if self._held_bytes > _HELD_BYTES and not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()
        if self._reader is not None and (self._held or self._head_done):
            self._wake()

    def pause_writing(self) -> None:
        """Called by the event loop."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """Called by the event loop."""
        self._write_paused = False
        self._wake()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        if self._ended:  # whoever asks next must not get it
            raise ValueError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _HEAD_BYTES:
            raise ValueError("headers without end")
        name = name.lower()
        if name in _FRAMING:
            self._framed = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if status < 200:  # "go on", "wait": the answer is yet to come
            self.headers, self._framed = [], False
            return
        self.status, self._head_done = status, True
        if status in _BODILESS:
            self._framed = True

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._held.append(body)
        self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._head_done:
            self._ended = True
            self._kept = self._parser.should_keep_alive()

    def _disconnected(self, error: Exception | None) -> ReplicaError:
        return ReplicaError("disconnected", f"{self.url} closed the connection: {error or 'EOF'}")

    def _wake(self) -> None:
        for future in (self._reader, self._writer):
            if future is not None and not future.done():
                future.set_result(None)

    async def _until_something(self) -> None:
        self.asked = self._loop.time()
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    async def _until_writable(self) -> None:
        while self._write_paused and self._error is None and not self._head_done:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
