"""A replica over real sockets that answers from captured bytes, or misbehaves as told.

It speaks just enough HTTP/1.1 to be what the gateway talks to. What it does with a generation
request is a coroutine that a test gives it, so a test can hold every byte in its hands.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures"
STREAM_HEADERS = "content-type: text/event-stream; charset=utf-8\r\n"
JSON_HEADERS = "content-type: application/json\r\n"
DONE = b"data: [DONE]\n\n"


def captured(name: str) -> bytes:
    """A captured answer, whole: status line, headers, body."""
    return (FIXTURES / f"{name}.response").read_bytes()


def captured_body(name: str) -> bytes:
    """The body of a captured answer, without its chunked framing."""
    head, _, body = captured(name).partition(b"\r\n\r\n")
    if b"chunked" not in head:
        return body
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        whole, body = whole + body[:length], body[length + 2 :]
    return whole


def event(text: str = "x", **extra: object) -> bytes:
    """One chat completion chunk as an SSE event."""
    delta = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return b"data: " + json.dumps({**chunk, "choices": [delta], **extra}).encode() + b"\n\n"


@dataclass
class Received:
    """A request as it came, and the connection to answer it on."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the gateway has closed the connection, or the answer has ended."""

    def header(self, name: str) -> str | None:
        """The first header of that (lower-case) name."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> dict[str, Any]:
        """The body, parsed."""
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    async def send(self, data: bytes) -> None:
        """Raw bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def replay(self, name: str) -> None:
        """A captured answer, byte for byte, then the end of the connection."""
        await self.send(captured(name))

    async def start_stream(self) -> None:
        """The head of a streamed answer."""
        head = f"HTTP/1.1 200 OK\r\n{STREAM_HEADERS}transfer-encoding: chunked\r\n\r\n"
        await self.send(head.encode())

    async def chunk(self, data: bytes) -> None:
        """One HTTP chunk."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        """The end of a chunked answer."""
        await self.send(b"0\r\n\r\n")

    async def answer(self, status: int, body: bytes, headers: str = JSON_HEADERS) -> None:
        """A whole answer."""
        head = f"HTTP/1.1 {status} X\r\n{headers}content-length: {len(body)}\r\n\r\n"
        await self.send(head.encode() + body)

    def reset(self) -> None:
        """Die: the peer sees a reset connection."""
        self.writer.transport.abort()

    async def until_gone(self) -> None:
        """Return when the gateway closes this connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        self.gone.set()


Behaviour = Callable[[Received], Awaitable[None]]


async def answer_captured_chat(request: Received) -> None:
    """The captured streamed or whole answer, as asked."""
    await request.replay("chat_stream" if request.json.get("stream") else "chat")


class FaultyReplica:
    """One replica; use as an async context manager."""

    def __init__(self, behaviour: Behaviour = answer_captured_chat) -> None:
        self.behaviour = behaviour
        self.health_status = 200
        self.health_hangs = False
        self.models: dict[str, Any] = json.loads(captured_body("v1_models"))
        self.server_info: dict[str, Any] = json.loads((FIXTURES / "server_info.json").read_text())
        self.load: dict[str, Any] | None = {
            "max_total_num_tokens": 10**6,
            "max_running_requests": 1000,
        }
        """The only rank of ``/v1/loads``; ``None`` makes it fail with 500. Room for everyone."""
        self.metrics = ""
        self.prompt_tokens: int | None = 14
        """What ``/tokenize`` counts; ``None`` makes it fail with 500."""
        self.health_checks = 0
        self.tokenized: list[Received] = []
        self.generations: list[Received] = []
        self.arrived: asyncio.Queue[Received] = asyncio.Queue()
        self.aborted: asyncio.Queue[str] = asyncio.Queue()
        self.port = 0
        self.tls: ssl.SSLContext | None = None
        """With it, it speaks https."""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FaultyReplica":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen (again, on the same port)."""
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self.port, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: stop listening and reset every connection."""
        if self._server is not None:
            self._server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async for request in _requests(reader, writer):
                await self._handle(request)
                if request.gone.is_set() or writer.is_closing():
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _handle(self, request: Received) -> None:
        path = request.path
        if path == "/health":
            self.health_checks += 1
            if self.health_hangs:
                await request.until_gone()
                return
            await request.answer(self.health_status, b"")
        elif path == "/v1/models":
            await request.answer(200, json.dumps(self.models).encode())
        elif path == "/server_info":
            await request.answer(200, json.dumps(self.server_info).encode())
        elif path == "/v1/loads":
            status = 500 if self.load is None else 200
            await request.answer(status, json.dumps({"loads": [self.load]}).encode())
        elif path == "/metrics":
            await request.answer(200, self.metrics.encode(), "content-type: text/plain\r\n")
        elif path == "/tokenize":
            self.tokenized.append(request)
            if self.prompt_tokens is None:
                await request.answer(500, b"{}")
            else:
                counted = {"tokens": [], "count": self.prompt_tokens, "max_model_len": 8192}
                await request.answer(200, json.dumps(counted).encode())
        elif path == "/abort_request":
            await request.answer(200, b"")
            self.aborted.put_nowait(request.json["rid"])
        else:
            self.generations.append(request)
            self.arrived.put_nowait(request)
            await self.behaviour(request)
            with contextlib.suppress(ConnectionError):
                await request.writer.drain()
            if not request.writer.is_closing():
                request.writer.close()
            request.gone.set()


async def _requests(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> AsyncIterator[Received]:
    while head := await _head(reader):
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        pairs = [line.split(":", 1) for line in lines if line]
        headers = [(name.lower(), value.strip()) for name, value in pairs]
        length = int(dict(headers).get("content-length", "0"))
        body = await reader.readexactly(length)
        yield Received(method, path, headers, body, reader, writer)


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
