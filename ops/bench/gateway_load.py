"""Clients of a gateway under measurement: raw connections that cost little themselves."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import httptools

_FILL = "Nobody reads these words; they make the prompt as long as prompts are. " * 12
_SECONDS = 120.0


def request(
    port: int, model: str, text: str, *, stream: bool, key: str, extra: Mapping[str, object]
) -> bytes:
    """A chat completion request as it goes over the wire."""
    messages = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": f"{text} {_FILL}"},
    ]
    fields = {"model": model, "messages": messages, "max_tokens": 256, "stream": stream, **extra}
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"content-type: application/json\r\nauthorization: Bearer {key}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(slots=True)
class Answer:
    """One answer; times are monotonic seconds, 0 where it never came to that."""

    sent: float
    first: float = 0.0
    ended: float = 0.0
    status: int = 0
    events: int = 0
    whole: bool = False
    body: list[bytes] = field(default_factory=list)
    """Kept for errors alone."""


class Connection(asyncio.Protocol):
    """One client connection, one request at a time."""

    def __init__(self) -> None:
        self.lost = False
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer = Answer(0.0)
        self._done: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server accepted."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        """The server closed."""
        self.lost = True
        self._end(whole=False)

    def ask(self, wire: bytes) -> "asyncio.Future[Answer]":
        """Send a request; done when its answer has ended, whole or not."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer(time.monotonic())
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(wire)
        return self._done

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer."""
        if self._parser is not None:
            self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        assert self._parser is not None
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        answer = self._answer
        if not answer.first:
            answer.first = time.monotonic()
        answer.events += body.count(b"data: {")
        if answer.status != 200:
            answer.body.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        assert self._parser is not None
        if not self._parser.should_keep_alive():
            self.lost = True
            self.close()
        self._end(whole=True)

    def _end(self, *, whole: bool) -> None:
        if self._done is not None and not self._done.done():
            self._answer.ended, self._answer.whole = time.monotonic(), whole
            self._done.set_result(self._answer)


async def connect(port: int) -> Connection:
    """A fresh connection to this machine's ``port``."""
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(Connection, "127.0.0.1", port))[1]


async def ask_once(port: int, wire: bytes, seconds: float = _SECONDS) -> Answer:
    """One request on a connection of its own; an empty answer where there was none in time."""
    begun = time.monotonic()
    try:
        connection = await connect(port)
    except OSError:
        return Answer(begun)
    try:
        async with asyncio.timeout(seconds):
            return await connection.ask(wire)
    except TimeoutError:
        return Answer(begun)
    finally:
        connection.close()


async def ask_many(port: int, wire: bytes, total: int, together: int) -> int:
    """``total`` requests on ``together`` kept connections; how many were not answered with 200."""
    left, bad = total, 0

    async def worker() -> None:
        nonlocal left, bad
        connection = await connect(port)
        while left > 0:
            left -= 1
            if connection.lost:
                connection = await connect(port)
            answer = await asyncio.wait_for(connection.ask(wire), _SECONDS)
            bad += answer.status != 200 or not answer.whole
        connection.close()

    await asyncio.gather(*(worker() for _ in range(together)))
    return bad


async def stream_many(port: int, wire: bytes, streams: int, spread: float) -> list[Answer]:
    """``streams`` answers at once, begun over ``spread`` seconds, each on its own connection."""

    async def one(number: int) -> Answer:
        await asyncio.sleep(spread * number / streams)
        return await ask_once(port, wire)

    return await asyncio.gather(*(one(number) for number in range(streams)))


async def first_bytes(port: int, wire: bytes, rate: float, seconds: float) -> list[float]:
    """Seconds to the first byte of the body, at ``rate`` requests a second on kept connections."""
    idle: list[Connection] = []
    times: list[float] = []

    async def one() -> None:
        connection = idle.pop() if idle else await connect(port)
        if connection.lost:
            connection = await connect(port)
        answer = await asyncio.wait_for(connection.ask(wire), _SECONDS)
        if answer.status == 200:
            times.append(answer.first - answer.sent)
        idle.append(connection)

    begun = time.monotonic()
    tasks = []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return times
