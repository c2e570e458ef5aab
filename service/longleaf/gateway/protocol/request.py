"""One request of a connection: the ASGI application's ``receive`` and ``send``."""

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

from starlette.types import Message

from longleaf.gateway.api.errors import ApiError
from longleaf.gateway.protocol.reader import RequestHead
from longleaf.gateway.protocol.response import Headers, ResponseHead, response_head

_UNREAD_BYTES = 256 * 1024
"""Of a body, above which the client is made to wait."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


Body = Literal["coming", "whole", "read", "broken"]
"""Where a request's body stands: all of it is here (``whole``), and the application has its end
(``read``); or it is malformed (``broken``): no more comes, and the application is told why."""

Answer = Literal["awaited", "started", "complete", "lost"]
"""Where its answer stands. ``lost``: the client is gone, or nothing more will come of the
application."""


class Client(Protocol):
    """The connection, as a request sees it."""

    loop: asyncio.AbstractEventLoop
    write_paused: bool

    @property
    def default_headers(self) -> Headers:
        """Headers of every answer."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes."""
        ...

    async def until_writable(self) -> None:
        """Return when the client has read some of what was sent, or is gone."""
        ...

    def pause_reading(self) -> None:
        """Make the client wait."""
        ...

    def resume_reading(self) -> None:
        """Let the client send again."""
        ...

    def end(self, request: "Request") -> None:
        """``request`` is answered."""
        ...


class Request:
    """What came of a client by its ``head``. It holds no scope: that holds it."""

    __slots__ = (
        "_answer_head",
        "_client",
        "_error",
        "_expects",
        "_held",
        "_leave",
        "_parts",
        "_waiter",
        "answer",
        "body",
        "head",
        "keep_alive",
        "task",
    )

    task: "asyncio.Task[None]"
    """What answers it, once its turn has come."""

    def __init__(self, client: Client, head: RequestHead) -> None:
        self.head = head
        self.keep_alive = head.keep_alive
        """Whether the connection goes on after the answer."""
        self.body: Body = "coming"
        self.answer: Answer = "awaited"
        self._client = client
        self._expects = head.expects
        self._parts: list[bytes] = []
        self._held = 0
        self._answer_head: ResponseHead | None = None
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._leave: Callable[[], None] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more of the answer is to come."""
        return self.answer == "complete" or self.answer == "lost"

    @property
    def open_stream(self) -> bool:
        """Whether a comment line could be sent now."""
        head = self._answer_head
        return self.answer == "started" and head is not None and head.events and head.chunked

    def body_comes(self, data: bytes) -> None:
        """A part of the body."""
        if self.over:
            return
        self._parts.append(data)
        self._held += len(data)
        if self._held > _UNREAD_BYTES:
            self._client.pause_reading()
        self._wake()

    def body_ends(self) -> None:
        """The body is here."""
        self.body = "whole"
        self._wake()

    def body_breaks(self, error: ApiError) -> None:
        """The rest of the body cannot be read: ``error`` is the answer, if there is none yet."""
        self.body = "broken"
        self.keep_alive = False
        self._error = error
        self._wake()

    def lose(self) -> None:
        """The client has left, or the application given up."""
        if self.answer != "complete":
            self.answer = "lost"
            if self._leave is not None:
                self._leave()
        self._wake()

    def whole_body(self) -> bytes | None:
        """The body, if all of it is here and none was received; nothing is left to receive then."""
        if self.body != "whole" or self._expects or self.over:
            return None
        parts, self._parts = self._parts, []
        self._held = 0
        self.body = "read"
        self._client.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def on_leave(self, call: Callable[[], None]) -> None:
        """``call`` once the client leaves before it has its whole answer; at once if it has left.
        The body must have been received.
        """
        if self.answer == "lost":
            call()
            return
        self._leave = call
        self._client.resume_reading()

    def forget_leave(self) -> None:
        """Call nothing any more."""
        self._leave = None

    async def receive(self) -> Message:
        """ASGI's: the body in parts, then, once the client leaves or has its answer, the end.

        ``ApiError`` for a body that is malformed.
        """
        while not self.over:
            if self._error is not None:
                if self.answer == "awaited":
                    raise self._error
                break
            if self._parts or self.body == "whole":
                parts, self._parts = self._parts, []
                self._held = 0
                if self.body == "whole":
                    self.body = "read"
                data = parts[0] if len(parts) == 1 else b"".join(parts)
                more = self.body == "coming"
                return {"type": "http.request", "body": data, "more_body": more}
            if self._expects:
                self._expects = False
                self._client.write(CONTINUE)
            self._client.resume_reading()
            self._waiter = self._client.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """ASGI's. The head leaves with the body's first part."""
        client = self._client
        if message["type"] == "http.response.start":
            self._start(message)  # without waiting: a comment's head must not come after a body
            return
        if client.write_paused and self.answer != "lost":
            await client.until_writable()
        answer, head = self.answer, self._answer_head
        if answer == "lost" or head is None:
            return
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if more and answer == "started" and head.chunked:  # most of what is ever sent
            if body:
                client.write(b"%x\r\n%b\r\n" % (len(body), body))
            return
        parts: list[bytes] = []
        if answer == "awaited":
            self.answer = "started"
            parts = head.lines
        if self.head.method != "HEAD":
            if not head.chunked:
                parts.append(body)
            elif body:
                parts += (b"%x\r\n" % len(body), body, b"\r\n")
            if head.chunked and not more:
                parts.append(b"0\r\n\r\n")
        client.write(parts[0] if len(parts) == 1 else b"".join(parts))
        if not more:
            self.answer = "complete"
            self._wake()
            client.end(self)

    def _start(self, message: Message) -> None:
        self._expects = False
        headers = (*self._client.default_headers, *message.get("headers", ()))
        self._answer_head = response_head(
            message["status"], headers, self.head.version, self.keep_alive
        )
        self.keep_alive = self._answer_head.keep_alive
        if self.head.method == "HEAD":
            self._answer_head.chunked = False  # as it says, but nothing follows

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
