"""HTTP client of one replica: its own connection pool, time-outs and errors.

One pool a replica, so that a hung replica can hold nobody else's connections.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

FailureKind = Literal[
    "connect", "disconnected", "first_byte_timeout", "idle_timeout", "bad_answer", "ended_early"
]

_KEEPALIVE_SECONDS = 3.0
"""Idle connections are dropped before the replica's server does it (uvicorn: 5 s), so that a
request does not meet a connection that is just being closed."""


_PIECE_BYTES = 256 * 1024

Body = Sequence[bytes | memoryview]
"""A body in parts, in order."""


class ReplicaError(Exception):
    """An exchange with a replica that did not end in a whole answer."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class JsonBody(Payload):
    """A request body that is already JSON text (aiohttp warns of large plain ``bytes``)."""

    def __init__(self, parts: Body) -> None:
        super().__init__(parts, content_type="application/json")
        self._size = sum(len(part) for part in parts)
        self._autoclose = True

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text."""
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the whole body, a piece at a time: a long one must not hold up the event loop."""
        for part in self._value:
            whole = memoryview(part)
            for start in range(0, len(whole), _PIECE_BYTES):
                await writer.write(whole[start : start + _PIECE_BYTES])


def as_failure(error: Exception, url: str) -> ReplicaError:
    """Name the kind of an aiohttp or socket error."""
    if isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
        return ReplicaError("connect", f"cannot connect to {url}: {error}")
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError):
        return ReplicaError("disconnected", f"{url} closed the connection: {error}")
    return ReplicaError("bad_answer", f"{url} did not answer in HTTP: {error}")


class ReplicaClient:
    """Requests to one replica. Must be made inside the event loop; ``close`` ends the pool."""

    def __init__(self, url: str, connect_timeout: float, api_key: str | None) -> None:
        self.url = url
        headers = {"accept-encoding": "identity"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            skip_auto_headers=("User-Agent", "Accept"),
            auto_decompress=False,
        )

    async def post(
        self, path: str, body: Body, headers: Sequence[tuple[str, str]]
    ) -> aiohttp.ClientResponse:
        """Send a request; returns when the answer's headers are there. The caller closes it."""
        try:
            return await self._session.post(
                self.url + path, data=JsonBody(body), headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            raise as_failure(error, self.url) from error

    async def fetch(
        self, method: str, path: str, limit: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """One small request in at most ``limit`` seconds: status and body."""
        try:
            async with asyncio.timeout(limit):
                return await self._fetch(method, path, body)
        except TimeoutError as error:
            message = f"{self.url}{path} did not answer in {limit:g} s"
            raise ReplicaError("first_byte_timeout", message) from error

    async def _fetch(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        data = None if body is None else JsonBody((body,))
        try:
            async with self._session.request(
                method, self.url + path, data=data, allow_redirects=False
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise as_failure(error, self.url) from error

    async def fetch_json(
        self, method: str, path: str, limit: float, body: bytes | None = None
    ) -> Any:
        """Like ``fetch``, for an answer that must be 200 and JSON."""
        status, answer = await self.fetch(method, path, limit, body)
        if status != 200:
            raise ReplicaError("bad_answer", f"{self.url}{path} answered {status}")
        try:
            return json.loads(answer)
        except ValueError as error:
            raise ReplicaError("bad_answer", f"{self.url}{path}: not JSON: {error}") from error

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
