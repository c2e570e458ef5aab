"""HTTP client of one replica: its own connections, time-outs and errors.

One set of connections a replica, so that a hung replica can hold nobody else's.
"""

import asyncio
import json
import math
import ssl
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from longleaf.gateway.replicas.connection import (
    Body,
    Connection,
    FailureKind,
    RawHeaders,
    ReplicaError,
)

__all__ = ["Body", "FailureKind", "RawHeaders", "ReplicaClient", "ReplicaError"]

_KEEPALIVE_SECONDS = 3.0
"""Idle connections are dropped before the replica's server does it (uvicorn: 5 s), so that a
request does not meet a connection that is just being closed."""
_MOST_BYTES = 16 * 2**20
"""Of an answer that is no generation: no model list, load report or metrics page is as long."""


class ReplicaClient:
    """Requests to one replica. Must be made inside the event loop; ``close`` ends its connections.

    ``tls``: how to speak to an ``https`` replica; by default the system's trust store decides.
    """

    def __init__(
        self,
        url: str,
        connect_timeout: float,
        api_key: str | None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.url = url
        parts = urlsplit(url)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").encode()
        self._connect_timeout = connect_timeout
        fixed = [(b"host", parts.netloc.encode()), (b"accept-encoding", b"identity")]
        if api_key is not None:
            fixed.append((b"authorization", f"Bearer {api_key}".encode()))
        self._fixed = _lines(fixed)
        self._loop = asyncio.get_running_loop()
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Connections that are in use."""
        return len(self._open) - len(self._idle)

    async def begin(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: Body
    ) -> Connection:
        """Send a request; returns when the answer's head is there. ``end`` takes the connection.

        A kept connection that the replica closed meanwhile is replaced by a fresh one for a GET;
        anything else might have been begun.
        """
        while True:
            connection = self.kept() or await self.connect()
            try:
                await self.ask(connection, method, path, headers, body)
            except ReplicaError as error:
                self.end(connection)
                stale = connection.reused and not connection.answered
                if method != "GET" or error.kind != "disconnected" or not stale:
                    raise
            except BaseException:
                self.end(connection)
                raise
            else:
                return connection

    def kept(self) -> Connection | None:
        """A kept connection for one exchange, if there is one; ``end`` takes it back."""
        oldest = self._loop.time() - _KEEPALIVE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost and connection.idle_since >= oldest:
                return connection
            self._open.discard(connection)
            connection.close()
        return None

    async def ask(
        self,
        connection: Connection,
        method: str,
        path: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: Body,
    ) -> None:
        """Send a request; returns when the answer's head is there."""
        size = sum([len(part) for part in body])
        length = b"" if method == "GET" else b"content-length: %d\r\n" % size
        line = b"%b %b%b HTTP/1.1\r\n" % (method.encode(), self._prefix, path.encode())
        head = b"".join((line, self._fixed, _lines(headers), length, b"\r\n"))
        await connection.ask(head, body, size)

    def end(self, connection: Connection) -> None:
        """The exchange is over: keep the connection if that is possible."""
        if not connection.reusable:
            self._open.discard(connection)
            connection.close()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_KEEPALIVE_SECONDS, self._drop_old)

    async def fetch(
        self,
        method: str,
        path: str,
        limit: float,
        body: bytes | None = None,
        most: int = _MOST_BYTES,
    ) -> tuple[int, bytes]:
        """One small request in at most ``limit`` seconds: status and body, of ``most`` bytes."""
        headers = [] if body is None else [(b"content-type", b"application/json")]
        try:
            async with asyncio.timeout(limit):
                connection = await self.begin(method, path, headers, (body or b"",))
                try:
                    answer = bytearray()
                    while part := await connection.read():
                        answer += part
                        if len(answer) > most:
                            message = f"{self.url}{path} answered with over {most} bytes"
                            raise ReplicaError("bad_answer", message)
                finally:
                    self.end(connection)
        except TimeoutError as error:
            message = f"{self.url}{path} did not answer in {limit:g} s"
            raise ReplicaError("first_byte_timeout", message) from error
        return connection.status, bytes(answer)

    async def fetch_json(
        self,
        method: str,
        path: str,
        limit: float,
        body: bytes | None = None,
        most: int = _MOST_BYTES,
    ) -> Any:
        """Like ``fetch``, for an answer that must be 200 and JSON."""
        status, answer = await self.fetch(method, path, limit, body, most)
        if status != 200:
            raise ReplicaError("bad_answer", f"{self.url}{path} answered {status}")
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise ReplicaError("bad_answer", f"{self.url}{path}: not JSON: {error}") from error

    async def close(self) -> None:
        """Close every connection."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self._open):
            connection.close()
        self._open.clear()
        self._idle.clear()
        await asyncio.sleep(0)  # the event loop closes the sockets on its next turn

    async def connect(self, deadline: float = math.inf) -> Connection:
        """A new connection for one exchange; ``end`` takes it back.

        ``deadline``: loop time at which to give up, if that comes first.
        """
        began = self._loop.time()
        try:
            async with asyncio.timeout_at(min(began + self._connect_timeout, deadline)):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self.url), self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            message = f"cannot connect to {self.url} in {self._loop.time() - began:.3g} s"
            raise ReplicaError("connect", message) from error
        except (OSError, ssl.SSLError) as error:
            raise ReplicaError("connect", f"cannot connect to {self.url}: {error}") from error
        self._open.add(connection)
        return connection

    def _drop_old(self) -> None:
        oldest = self._loop.time() - _KEEPALIVE_SECONDS
        old = [one for one in self._idle if one.lost or one.idle_since <= oldest]
        for connection in old:
            self._open.discard(connection)
            connection.close()
        self._idle = [one for one in self._idle if one not in old]
        self._sweep = None
        if self._idle:
            self._sweep = self._loop.call_later(_KEEPALIVE_SECONDS, self._drop_old)


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])
