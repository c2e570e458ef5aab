"""One request on one replica, from connection to the last byte or to its abort."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from longleaf.gateway.replicas.connection import Body, Connection, RawHeaders, ReplicaError
from longleaf.gateway.replicas.replica import Replica

_MAX_HELD_BYTES = 8 * 2**20
_TIMER_RESOLUTION = 1e-3
"""Seconds by which a loop's timer may be early."""
_DONE = (b"[DONE]\n\n", b"[DONE]\r\n\r\n")


@dataclass(slots=True)
class Head:
    """The start of an answer: enough to choose the client's status."""

    status: int
    headers: RawHeaders
    first: bytes
    """A stream's events up to the first that carries data; otherwise the whole body."""
    streaming: bool
    error: Mapping[str, Any] | None
    """The error that the body, or the first event, consists of."""


class Exchange:
    """Context manager: leaving it ends the upstream answer, whatever happened.

    An answer that was not read to its end is aborted on the replica, which stops within a step.
    Times in seconds: ``deadline`` is the loop time by which the first event must have come,
    ``idle_timeout`` the longest wait for each further one.
    """

    def __init__(self, replica: Replica, rid: str, deadline: float, idle_timeout: float) -> None:
        self._replica = replica
        self._rid = rid
        self._deadline = deadline
        self._idle_timeout = idle_timeout
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._began = self._loop.time()
        self._given_up: ReplicaError | None = None
        self._held = b""
        self._latest = b""
        self._asked = 0.0
        self._started = False
        self._sent = False
        self._done = False
        self._complete = False

    @property
    def done(self) -> bool:
        """Whether a piece has ended with ``[DONE]``."""
        return self._done

    @property
    def asked(self) -> float:
        """Loop time at which the latest piece was asked for."""
        return self._asked

    def __enter__(self) -> "Exchange":
        self._replica.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._replica.leave(self)
        if self._connection is not None:
            self._connection.deadline.disarm()
            self._replica.client.end(self._connection)
        if self._sent and not self._complete:
            self._replica.abort(self._rid, self._started)
        if isinstance(error, ReplicaError):
            self._replica.count_error(error.kind)
            if error.kind != "idle_timeout":
                self._replica.note_failed_request(str(error))

    def give_up(self, error: ReplicaError) -> None:
        """Stop waiting for the first event: the replica is hung, or the time is up."""
        if not self._started and self._given_up is None:
            self._given_up = error
            if self._connection is not None:
                self._connection.fail(error)

    async def begin(self, path: str, body: Body, headers: Iterable[tuple[bytes, bytes]]) -> Head:
        """Send the request and wait for the first event (or the whole body, if it is no stream)."""
        client = self._replica.client
        connection = self._connection = client.kept() or await self._connect()
        connection.deadline.arm_at(self._deadline, self._too_late)
        self._sent = True
        await client.ask(connection, "POST", path, headers, body)
        kind = dict(connection.headers).get(b"content-type", b"")
        streaming = connection.status == 200 and kind.startswith(b"text/event-stream")
        first = await (self._first_event() if streaming else self._whole_body(connection))
        connection.deadline.disarm()
        if not 200 <= connection.status < 300 and connection.status < 400:
            message = f"{self._replica.url} answered with status {connection.status}"
            raise ReplicaError("bad_answer", message)
        self._started = True
        self._replica.begun(self)
        self._replica.note_alive()
        found = _stream_error(first) if streaming else _body_error(connection.status, first)
        if found is not None:  # nothing of ours runs there
            self._sent = self._complete = False
        elif streaming:
            self._latest = first
            self._watch_silence()
        return Head(connection.status, connection.headers, first, streaming, found)

    async def next_piece(self) -> bytes | None:
        """The next whole events as they came; ``None`` after the end of a stream with ``[DONE]``.

        Part of an event waits for its rest: it is no use to a client, and after it no error event
        could be told. Raises ``ReplicaError`` for silence, a cut, or an end without ``[DONE]``.
        """
        assert self._connection is not None
        self._asked = self._loop.time()
        while True:
            try:
                chunk = await self._connection.read()
            except ReplicaError:
                if not self._said_its_end():
                    raise
                chunk = b""
            if not chunk:
                return self._last_piece()
            piece = self._whole_events(chunk)
            if piece:
                self._replica.alive_at = self._asked
                self._latest = piece
                return piece

    async def _connect(self) -> Connection:
        """A new connection, unless the request is given up meanwhile."""
        try:
            connection = await self._replica.client.connect(self._deadline)
        except ReplicaError as failure:
            if self._loop.time() >= self._deadline - _TIMER_RESOLUTION:
                self._too_late()
            raise self._given_up or failure from None
        self._connection = connection
        if self._given_up is not None:
            raise self._given_up
        return connection

    def _too_late(self) -> None:
        message = f"{self._replica.url} sent nothing for {self._loop.time() - self._began:.3g} s"
        self.give_up(ReplicaError("first_byte_timeout", message))

    def _watch_silence(self) -> None:
        """Look now and then whether the replica has been silent for too long: a timer for each
        piece would cost more than the piece.
        """
        connection = self._connection
        assert connection is not None
        due = self._asked + self._idle_timeout
        now = self._loop.time()
        if connection.waiting and self._asked and now >= due:
            message = f"{self._replica.url} was silent for {self._idle_timeout:g} s"
            connection.fail(ReplicaError("idle_timeout", message))
            return
        due = due if due > now else now + self._idle_timeout
        connection.deadline.arm_at(due, self._watch_silence)

    async def _first_event(self) -> bytes:
        assert self._connection is not None
        collected = b""
        while True:
            chunk = await self._connection.read()
            if not chunk:
                raise ReplicaError("ended_early", f"{self._replica.url} ended before an event")
            collected += self._whole_events(chunk)
            if _has_data(collected) or len(collected) > _MAX_HELD_BYTES:
                return collected

    async def _whole_body(self, connection: Connection) -> bytes:
        parts = []
        while not connection.over:
            parts.append(await connection.read())
        self._complete = self._done = True
        return b"".join(parts)

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
        if data.endswith(_DONE):
            self._done = True
        return data

    def _last_piece(self) -> bytes | None:
        rest, self._held = self._held, b""
        if self._said_its_end() or rest.strip() == b"data: [DONE]":
            self._done = self._complete = True
            return rest or None
        raise ReplicaError("ended_early", f"{self._replica.url} ended a stream without [DONE]")

    def _said_its_end(self) -> bool:
        """Whether ``[DONE]`` has come, or an error of the replica's own as its last event: a client
        needs to be told no other.
        """
        if self._done:
            return True
        events = b"\n" + self._latest.replace(b"\r\n", b"\n").rstrip()
        last = events.rpartition(b"\n\n")[2]
        return b"\ndata: [DONE]\n" in events + b"\n" or _stream_error(last) is not None


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
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
