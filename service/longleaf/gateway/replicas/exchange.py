"""One request on one replica, from connection to the last byte or to its abort."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from longleaf.gateway.replicas.client import Body, ReplicaError, as_failure
from longleaf.gateway.replicas.replica import Replica

_MAX_HELD_BYTES = 8 * 2**20
_DONE = (b"[DONE]\n\n", b"[DONE]\r\n\r\n")


@dataclass(frozen=True, slots=True)
class Head:
    """The start of an answer: enough to choose the client's status."""

    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes
    """A stream's events up to the first that carries data; otherwise the whole body."""
    streaming: bool
    error: Mapping[str, Any] | None
    """The error that the body, or the first event, consists of."""


class Exchange:
    """Async context manager: leaving it closes the upstream answer, whatever happened.

    An answer that was not read to its end is aborted on the replica, which stops within a step.
    """

    def __init__(
        self, replica: Replica, rid: str, first_byte_timeout: float, idle_timeout: float
    ) -> None:
        self._replica = replica
        self._rid = rid
        self._first_byte_timeout = first_byte_timeout
        self._idle_timeout = idle_timeout
        self._response: aiohttp.ClientResponse | None = None
        self._held = b""
        self._started = False
        self._sent = False
        self._done = False
        self._complete = False

    async def __aenter__(self) -> "Exchange":
        self._replica.in_flight += 1
        self._replica.waiting += 1
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._replica.in_flight -= 1
        if not self._started:
            self._replica.waiting -= 1
        if self._response is not None:
            if self._complete:
                self._response.release()
            else:
                self._response.close()
        if self._complete:
            self._replica.rate.completed()
        elif self._sent:
            self._replica.abort(self._rid, self._started)
        if isinstance(error, ReplicaError):
            self._replica.count_error(error.kind)
            if error.kind != "idle_timeout":
                self._replica.note_failure(str(error))

    async def begin(self, path: str, body: Body, headers: Sequence[tuple[str, str]]) -> Head:
        """Send the request and wait for the first event (or the whole body, if it is no stream)."""
        self._sent = True
        try:
            async with asyncio.timeout(self._first_byte_timeout):
                response = await self._replica.client.post(path, body, headers)
                self._response = response
                streaming = response.status == 200 and (
                    response.content_type == "text/event-stream"
                )
                first = await (self._first_event() if streaming else self._whole_body())
        except TimeoutError as error:
            message = f"{self._replica.url} sent nothing for {self._first_byte_timeout:g} s"
            raise ReplicaError("first_byte_timeout", message) from error
        except ReplicaError as failure:
            self._sent = failure.kind != "connect"
            raise
        if not 200 <= response.status < 300 and response.status < 400:
            message = f"{self._replica.url} answered with status {response.status}"
            raise ReplicaError("bad_answer", message)
        self._started = True
        self._replica.waiting -= 1
        self._replica.note_alive()
        raw = [(name.lower(), value) for name, value in response.raw_headers]
        found = _stream_error(first) if streaming else _body_error(response.status, first)
        if found is not None:  # nothing of ours runs there
            self._sent = self._complete = False
        return Head(response.status, raw, first, streaming, found)

    async def next_piece(self) -> bytes | None:
        """The next whole events as they came; ``None`` after the end of a stream with ``[DONE]``.

        Part of an event waits for its rest: it is no use to a client, and after it no error event
        could be told. Raises ``ReplicaError`` for silence, a cut, or an end without ``[DONE]``.
        """
        while True:
            chunk = await self._next_chunk()
            if not chunk:
                return self._last_piece()
            piece = self._whole_events(chunk)
            if piece:
                return piece

    async def _first_event(self) -> bytes:
        collected = b""
        while True:
            chunk = await self._read()
            if not chunk:
                raise ReplicaError("ended_early", f"{self._replica.url} ended before an event")
            collected += self._whole_events(chunk)
            if _has_data(collected) or len(collected) > _MAX_HELD_BYTES:
                return collected

    async def _whole_body(self) -> bytes:
        parts = []
        while chunk := await self._read():
            parts.append(chunk)
        self._complete = self._done = True
        return b"".join(parts)

    async def _next_chunk(self) -> bytes:
        try:
            async with asyncio.timeout(self._idle_timeout):
                return await self._read()
        except TimeoutError as error:
            if self._done:
                return b""
            message = f"{self._replica.url} was silent for {self._idle_timeout:g} s"
            raise ReplicaError("idle_timeout", message) from error
        except ReplicaError:
            if self._done:
                return b""
            raise

    async def _read(self) -> bytes:
        assert self._response is not None
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise as_failure(error, self._replica.url) from error

    def _whole_events(self, chunk: bytes) -> bytes:
        data = self._held + chunk if self._held else chunk
        if data.endswith((b"\n\n", b"\r\n\r\n")):
            self._held = b""
        else:
            line_feeds, crlfs = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
            end = max(line_feeds + 2 if line_feeds >= 0 else 0, crlfs + 4 if crlfs >= 0 else 0)
            if not end and len(data) > _MAX_HELD_BYTES:
                end = len(data)
            data, self._held = data[:end], data[end:]
        if data:
            self._done = data.endswith(_DONE)
        return data

    def _last_piece(self) -> bytes | None:
        rest, self._held = self._held, b""
        if self._done or rest.strip() == b"data: [DONE]":
            self._done = self._complete = True
            return rest or None
        raise ReplicaError("ended_early", f"{self._replica.url} ended a stream without [DONE]")


def _has_data(events: bytes) -> bool:
    return events.startswith(b"data:") or b"\ndata:" in events


def _stream_error(events: bytes) -> Mapping[str, Any] | None:
    """The ``error`` of the first event that carries data, if it has one."""
    for line in events.splitlines():
        if line.startswith(b"data:"):
            payload = _json_object(line[5:])
            if payload.get("object") == "error":
                return payload
            error = payload.get("error")
            return error if isinstance(error, dict) else None
    return None


def _body_error(status: int, body: bytes) -> Mapping[str, Any] | None:
    """A whole answer's error: SGLang's are flat, others nest them or use FastAPI's ``detail``."""
    if status < 400:
        return None
    payload = _json_object(body)
    error = payload.get("error")
    return error if isinstance(error, dict) else payload


def _json_object(text: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
