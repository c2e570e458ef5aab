"""The public port's HTTP/1.1: what a client may do wrong ends its connection, nobody else's.

An asyncio protocol that runs an ASGI application, in the place of uvicorn's own. Beyond that it
has limits (a head must come in time and in size; who reads nothing is let go), answers in our
envelope, and answers clients that have closed their sending side only.
"""

import asyncio
import functools
import logging
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope
from uvicorn import Config
from uvicorn.server import ServerState

from longleaf.gateway.api import errors

logger = logging.getLogger(__name__)

_UNREAD_BYTES = 256 * 1024
"""Of a body, above which the client is made to wait."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b": \n\n"
_PROBE_SECONDS = (0.0, 0.005, 0.05, 0.25, 1.0)
"""Pauses before the probes of a client that closed its sending side; after them the last
``_PROBE_INTERVAL`` repeats."""
_PROBE_INTERVAL = 5.0
_LINES: Mapping[int, bytes] = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds and bytes that a client may take."""

    header_timeout: float = 10.0
    write_timeout: float = 60.0
    keepalive_timeout: float = 75.0
    max_header_bytes: int = 64 * 1024


def http_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """The protocol for ``uvicorn.Config(http=…)``."""
    return cast(type[asyncio.Protocol], functools.partial(HttpProtocol, limits))


class _Request:
    """One request: the ASGI application's ``receive`` and ``send``."""

    __slots__ = (
        *("_connection", "_head", "_length", "_waiter", "body", "chunked", "complete"),
        *(
            "events",
            "expects",
            "gone",
            "head_sent",
            "held",
            "keep_alive",
            "more",
            "scope",
            "unread",
        ),
    )

    def __init__(
        self, connection: "HttpProtocol", scope: Scope, keep_alive: bool, expects: bool
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.expects = expects
        """Whether the client waits for a 100 before it sends its body."""
        self.body: list[bytes] = []
        self.held = 0
        self.more = True
        """Whether more of the body is to come."""
        self.unread = True
        """Whether the application is yet to learn the body's end."""
        self.gone = self.complete = self.head_sent = self.events = self.chunked = False
        self._connection = connection
        self._head: list[bytes] | None = None
        self._length = 0
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Something has come, or nothing more will."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> Message:
        """ASGI's: the body in parts, then, once the client leaves or has its answer, the end."""
        while not (self.gone or self.complete):
            if self.body or (self.unread and not self.more):
                body = self.body[0] if len(self.body) == 1 else b"".join(self.body)
                self.body.clear()
                self.held = 0
                self.unread = self.more
                return {"type": "http.request", "body": body, "more_body": self.more}
            if self.expects:
                self.expects = False
                self._connection.write(_CONTINUE)
            self._connection.resume_reading()
            self._waiter = self._connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """ASGI's. The head leaves with the body's first part."""
        connection = self._connection
        if message["type"] == "http.response.start":
            self._start(message)  # without waiting: a comment's head must not come after a body
            return
        if connection.write_paused and not self.gone:
            await connection.until_writable()
        if self.gone:
            return
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        parts = self._head if self._head is not None and not self.head_sent else []
        self.head_sent = True
        if self.scope["method"] != "HEAD":
            if not self.chunked:
                parts.append(body)
            elif body:
                parts += (b"%x\r\n" % len(body), body, b"\r\n")
            if self.chunked and not more:
                parts.append(b"0\r\n\r\n")
        connection.write(parts[0] if len(parts) == 1 else b"".join(parts))
        if not more:
            self.complete = True
            self.wake()
            connection.end(self)

    def _start(self, message: Message) -> None:
        status: int = message["status"]
        lines = [_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        self.expects = False
        sized = status in {204, 304}
        closes = False
        for name, value in (*self._connection.default_headers, *message.get("headers", ())):
            lines += (name, b": ", value, b"\r\n")
            if name == b"content-length":
                sized = True
            elif name == b"content-type":
                self.events = value.startswith(b"text/event-stream")
            elif name == b"connection":
                closes = b"close" in value.lower()
        self.keep_alive = self.keep_alive and not closes
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        if not sized and self.scope["http_version"] == "1.0":
            self.keep_alive = False
        elif not sized:
            self.chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        self._head = lines


class HttpProtocol(asyncio.Protocol):
    """One client connection."""

    def __init__(
        self,
        limits: ConnectionLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.loop = _loop or asyncio.get_running_loop()
        self.write_paused = False
        self._limits = limits
        self._app = cast(ASGIApp, config.loaded_app)
        self._state = server_state
        self._app_state = app_state
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None
        self._scheme = "http"
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._in_head = False
        self._refused: errors.ApiError | None = None
        self._current: _Request | None = None
        """The request that is being answered."""
        self._receiving: _Request | None = None
        """The request whose body comes in: the same, or one that waits its turn."""
        self._pipeline: deque[_Request] = deque()
        self._read_paused = self._half_closed = False
        self._writable: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every answer."""
        return self._state.default_headers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._state.connections.add(cast(Any, self))
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        self._scheme = "https" if self._is_tls else "http"
        self._arm(self._limits.keepalive_timeout, self._close)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._state.connections.discard(cast(Any, self))
        self._transport = None
        for request in (self._current, self._receiving, *self._pipeline):
            if request is not None:
                request.gone = not request.complete
                request.wake()
        self._pipeline.clear()
        for timer in (self._timer, self._write_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self.resume_writing()

    def eof_received(self) -> bool:
        """Called by the event loop when the client will send nothing more.

        Most clients have left then; some have closed their sending side only and wait for the
        answer. Who has left answers a write with a reset, so a few are written to see.
        """
        running = self._current
        if running is None or running.complete or self._is_tls:
            return False
        receiving = self._receiving
        if receiving is not running or running.more or running.scope["http_version"] == "1.0":
            return False
        self._half_closed = True
        running.keep_alive = False
        self._probe(0)
        return True

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._refused is not None:
            return
        if not self._in_head and self._current is None:
            self._disarm()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # not offered: the request is answered as if it had not asked
        except httptools.HttpParserError:
            self._refuse(
                self._refused or errors.invalid_request("The request is not valid HTTP/1.1.", None)
            )
            return
        if self._in_head and self._timer is None:
            self._arm(self._limits.header_timeout, self._head_is_late)

    def pause_writing(self) -> None:
        """Called by the event loop."""
        self.write_paused = True
        if self._write_timer is None and self._transport is not None:
            size = self._transport.get_write_buffer_size()
            later = self._limits.write_timeout
            self._write_timer = self.loop.call_later(later, self._check_reader, size)

    def resume_writing(self) -> None:
        """Called by the event loop."""
        self.write_paused = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    async def until_writable(self) -> None:
        """Return when the client has read some of what was sent, or is gone."""
        while self.write_paused and self._transport is not None:
            if self._writable is None or self._writable.done():
                self._writable = self.loop.create_future()
            await asyncio.shield(self._writable)

    def shutdown(self) -> None:
        """Called by the server when it ends."""
        if self._current is None:
            self._close()
        else:
            self._current.keep_alive = False

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if self._transport is not None:
            self._transport.write(data)

    def resume_reading(self) -> None:
        """Let the client send again."""
        if self._read_paused and self._transport is not None:
            self._read_paused = False
            self._transport.resume_reading()

    def end(self, request: _Request) -> None:
        """``request`` is answered: on to the next one."""
        self._state.total_requests += 1
        self._current = None
        if self._transport is None or self._transport.is_closing():
            return
        if not request.keep_alive or request.more:
            self._transport.close()
            return
        if self._pipeline:
            self._run(self._pipeline.popleft())
        elif not self._in_head:
            self._arm(self._limits.keepalive_timeout, self._close)
        if not self._pipeline:
            self.resume_reading()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._url = b""
        self._headers = []
        self._head_bytes = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._count(len(name) + len(value) + 4)
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head = False
        self._disarm()
        version = self._parser.get_http_version()
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii", "replace")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._server,
            "client": self._client,
            "scheme": self._scheme,
            "method": self._parser.get_method().decode("ascii"),
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self._headers,
            "state": self._app_state.copy(),
        }
        expects = (b"expect", b"100-continue") in self._headers
        keep_alive = version != "1.0" and self._parser.should_keep_alive()
        request = self._receiving = _Request(self, scope, keep_alive, expects)
        if self._current is None and not self._pipeline:
            self._run(request)
        else:
            self._pipeline.append(request)
            self._pause_reading()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        request = self._receiving
        if request is None or request.complete:
            return
        request.body.append(body)
        request.held += len(body)
        if request.held > _UNREAD_BYTES:
            self._pause_reading()
        request.wake()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._receiving is not None:
            self._receiving.more = False
            self._receiving.wake()

    @property
    def _is_tls(self) -> bool:
        transport = self._transport
        context = None if transport is None else transport.get_extra_info("sslcontext")
        return isinstance(context, ssl.SSLContext)

    def _run(self, request: _Request) -> None:
        self._current = request
        task = self.loop.create_task(self._answer(request))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _answer(self, request: _Request) -> None:
        try:
            await self._app(request.scope, request.receive, request.send)
        except Exception:
            logger.exception("the application failed")
        if not request.complete:  # nothing more will come of it
            request.gone = True
            self._current = None
            self._close()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.max_header_bytes:
            self._refused = errors.head_too_large(self._limits.max_header_bytes)
            raise self._refused

    def _refuse(self, error: errors.ApiError) -> None:
        """Answer what never became a request, and close."""
        self._refused = error
        body = error.body()
        lines = [_LINES[error.status], b"content-type: application/json\r\nconnection: close\r\n"]
        lines += [b"%b: %b\r\n" % header for header in self.default_headers]
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        if self._current is None:
            self.write(b"".join((*lines, body)))
        self._close()

    def _head_is_late(self) -> None:
        self._timer = None
        self._refuse(errors.head_stalled(self._limits.header_timeout))

    def _check_reader(self, before: int) -> None:
        """Has the client read anything since?"""
        self._write_timer = None
        if self._transport is None:
            return
        size = self._transport.get_write_buffer_size()
        if size < before:
            later = self._limits.write_timeout
            self._write_timer = self.loop.call_later(later, self._check_reader, size)
        else:
            self._transport.abort()

    def _probe(self, number: int) -> None:
        request = self._current
        if request is None or request.complete or self._transport is None:
            return
        if number > 0 and not request.head_sent:
            self.write(_CONTINUE)
        elif number > 0 and request.events and request.chunked:
            self.write(b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT))
        more = number < len(_PROBE_SECONDS)
        later = _PROBE_SECONDS[number] if more else _PROBE_INTERVAL
        self._probe_timer = self.loop.call_later(later, self._probe, number + 1)

    def _pause_reading(self) -> None:
        if not self._read_paused and self._transport is not None and not self._half_closed:
            self._read_paused = True
            self._transport.pause_reading()

    def _arm(self, seconds: float, then: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, then)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _address(name: object) -> tuple[str, int] | None:
    if isinstance(name, tuple) and len(name) >= 2:
        return str(name[0]), int(name[1])
    return None
