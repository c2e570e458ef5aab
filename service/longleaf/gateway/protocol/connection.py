"""One client connection: its requests in order, their answers, and its end."""

import asyncio
import functools
import logging
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast
from urllib.parse import unquote

from starlette.types import ASGIApp, Scope
from uvicorn import Config
from uvicorn.server import ServerState

from longleaf.gateway.api import client, errors
from longleaf.gateway.deadline import Deadline
from longleaf.gateway.protocol.reader import RequestHead, RequestReader
from longleaf.gateway.protocol.request import CONTINUE, Request
from longleaf.gateway.protocol.response import refusal
from longleaf.gateway.protocol.timers import Probes, SlowReader

logger = logging.getLogger(__name__)

_COMMENT = b": \n\n"
_LINGER_SECONDS = 2.0
_PROBE_PAUSES = (0.0, 0.005, 0.05, 0.25, 1.0, 5.0)
"""Seconds before the probes of a client that closed its sending side."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds and bytes that a client may take."""

    header_timeout: float = 10.0
    write_timeout: float = 60.0
    keepalive_timeout: float = 75.0
    max_header_bytes: int = 64 * 1024


OnRefusal = Callable[[errors.ApiError], None]
"""Told of what was refused before it was a request."""


def http_protocol(limits: ConnectionLimits, on_refusal: OnRefusal) -> type[asyncio.Protocol]:
    """The protocol for ``uvicorn.Config(http=…)``."""
    return cast(type[asyncio.Protocol], functools.partial(HttpProtocol, limits, on_refusal))


Input = Literal["open", "refused", "ended"]
"""What may still come of the client: requests (``open``); nothing that could be read, which it is
told once it has the answers that are due (``refused``); nothing, as it closed its sending side, and
may wait for answers (``ended``)."""


class HttpProtocol(asyncio.Protocol):
    """One client connection.

    Requests are answered one by one, in order: ``_current`` is being answered, those of
    ``_pipeline`` wait, the last that came (``_receiving``) may lack the rest of its body.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        on_refusal: OnRefusal,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.loop = _loop or asyncio.get_running_loop()
        self.write_paused = False
        self._limits = limits
        self._on_refusal = on_refusal
        self._app = cast(ASGIApp, config.loaded_app)
        self._state = server_state
        self._app_state = app_state
        self._transport: asyncio.Transport | None = None
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None
        self._scheme = "http"
        self._reader = RequestReader(self, limits.max_header_bytes)
        self._input: Input = "open"
        self._refusal: errors.ApiError | None = None
        self._current: Request | None = None
        self._receiving: Request | None = None
        self._pipeline: deque[Request] = deque()
        self._read_paused = False
        self._writable: asyncio.Future[None] | None = None
        self._deadline = Deadline(self.loop)
        """For the next request's first byte, then for its head."""
        self._slow_reader = SlowReader(self.loop, limits.write_timeout)
        self._probes = Probes(self.loop, _PROBE_PAUSES, self._probe)

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every answer."""
        return self._state.default_headers

    @property
    def _is_tls(self) -> bool:
        transport = self._transport
        context = None if transport is None else transport.get_extra_info("sslcontext")
        return isinstance(context, ssl.SSLContext)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._state.connections.add(cast(Any, self))
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        self._scheme = "https" if self._is_tls else "http"
        self._deadline.arm(self._limits.keepalive_timeout, self._close)

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone."""
        self._state.connections.discard(cast(Any, self))
        self._transport = None
        for request in (self._current, *self._pipeline):
            if request is not None:
                request.lose()
        self._pipeline.clear()
        self._deadline.close()
        self._probes.stop()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        if self._input != "open":
            return
        try:
            self._reader.feed(data)
        except errors.ApiError as error:
            self._refuse(error)
            return
        if self._reader.in_head and not self._deadline.armed:
            self._deadline.arm(self._limits.header_timeout, self._head_is_late)

    def eof_received(self) -> bool:
        """The client will send nothing more. Whether the connection stays open.

        Most clients have left then; some have closed their sending side only and wait for their
        answers. Who has left answers a write with a reset, so a few are written to see. What was
        not sent whole gets none.
        """
        if self._pipeline and self._pipeline[-1].body == "coming":
            self._pipeline.pop().lose()
        running = self._current
        if running is None or running.body == "coming" or self._is_tls:
            return False
        if self._input == "open":
            self._input = "ended"
            self._deadline.disarm()
            last = self._pipeline[-1] if self._pipeline else running
            last.keep_alive = False
        if running.head.version == "1.0":  # no probe is safe: what is quick is answered
            self._deadline.arm(_LINGER_SECONDS, self._close)
        else:
            self._probes.start()
        return True

    def pause_writing(self) -> None:
        """The client does not read what it is sent."""
        self.write_paused = True
        if self._transport is not None:
            self._slow_reader.watch(self._transport)

    def resume_writing(self) -> None:
        """The client reads."""
        self.write_paused = False
        self._slow_reader.stop()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    # What the reader calls.

    def head_begins(self) -> None:
        """A request begins."""
        self._deadline.disarm()

    def head_ends(self, head: RequestHead) -> None:
        """A request is there but for its body."""
        self._deadline.disarm()
        request = self._receiving = Request(self, head)
        if self._current is None:
            self._run(request)
        else:
            self._pipeline.append(request)
            self.pause_reading()

    def body_comes(self, data: bytes) -> None:
        """A part of the latest request's body."""
        if self._receiving is not None:
            self._receiving.body_comes(data)

    def body_ends(self) -> None:
        """The latest request is whole."""
        if self._receiving is not None:
            self._receiving.body_ends()

    # What a request, or the server, calls.

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if self._transport is not None:
            self._transport.write(data)

    async def until_writable(self) -> None:
        """Return when the client has read some of what was sent, or is gone."""
        while self.write_paused and self._transport is not None:
            if self._writable is None or self._writable.done():
                self._writable = self.loop.create_future()
            await asyncio.shield(self._writable)

    def pause_reading(self) -> None:
        """Make the client wait."""
        if not self._read_paused and self._transport is not None and self._input == "open":
            self._read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Let the client send again."""
        if self._read_paused and self._transport is not None:
            self._read_paused = False
            self._transport.resume_reading()

    def end(self, request: Request) -> None:
        """``request`` is answered: on to the next one."""
        self._state.total_requests += 1
        self._current = None
        self._probes.stop()
        if self._transport is None or self._transport.is_closing():
            return
        if request.body == "coming" or request.body == "broken":
            self._close_gently()
            return
        if not request.keep_alive:
            self._close()
            return
        if self._pipeline:
            self._run(self._pipeline.popleft())
        elif self._input != "open":
            self._finish()
            return
        elif not self._reader.in_head:
            self._deadline.arm(self._limits.keepalive_timeout, self._close)
        if not self._pipeline:
            self.resume_reading()

    def shutdown(self) -> None:
        """The server ends: so does the connection, with the answer that is under way."""
        if self._current is None:
            self._close()
        else:
            self._current.keep_alive = False

    def _run(self, request: Request) -> None:
        self._current = request
        if self._input == "ended":
            self._probes.start()
        request.task = self.loop.create_task(self._answer(request))
        self._state.tasks.add(request.task)

    def _scope(self, request: Request) -> Scope:
        head = request.head
        path = head.path.decode("ascii", "replace")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "server": self._server,
            "client": self._client,
            "scheme": self._scheme,
            "method": head.method,
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": head.path,
            "query_string": head.query,
            "headers": head.headers,
            "state": self._app_state.copy(),
            client.KEY: request,
        }

    async def _answer(self, request: Request) -> None:
        try:
            await self._app(self._scope(request), request.receive, request.send)
        except Exception:
            logger.exception("the application failed")
        finally:
            self._state.tasks.discard(request.task)
        if request.answer != "complete":  # nothing more will come of it
            request.lose()
            self._current = None
            self._close()

    def _head_is_late(self) -> None:
        if self._read_paused:  # it is made to wait
            self._deadline.arm(self._limits.header_timeout, self._head_is_late)
            return
        self._refuse(errors.head_stalled(self._limits.header_timeout))

    def _refuse(self, error: errors.ApiError) -> None:
        """Nothing more can be read: say so after the answers that are due, and close."""
        self._input = "refused"
        self._deadline.disarm()
        broken = self._receiving
        if broken is not None and broken.body == "coming":
            broken.body_breaks(error)
        else:
            self._refusal = error
        if self._current is None:
            self._finish()

    def _finish(self) -> None:
        """All answers are sent, and nothing more can come."""
        if self._refusal is None:
            self._close()
        else:
            self._on_refusal(self._refusal)
            self.write(refusal(self._refusal, self.default_headers))
            self._close_gently()

    def _probe(self) -> None:
        request = self._current
        if request is None or request.over or self._transport is None:
            self._probes.stop()
        elif request.answer == "awaited":
            self.write(CONTINUE)
        elif request.open_stream:
            self.write(b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT))

    def _close_gently(self) -> None:
        """Close once the client has, or after a moment: one that still sends would be reset, and
        lose its answer. What it sends is thrown away.
        """
        self._input = "refused"
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.resume_reading()
        self._deadline.arm(_LINGER_SECONDS, self._close)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _address(name: object) -> tuple[str, int] | None:
    if isinstance(name, tuple) and len(name) >= 2:
        return str(name[0]), int(name[1])
    return None
