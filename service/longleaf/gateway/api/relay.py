"""Relay: one generation request from admission to its last byte.

The status is chosen only when the first event is there, since engines report errors inside streams
of status 200. Until then another replica may be tried and the client sees nothing of it.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longleaf.gateway.admission.admission import NoReplicaError, SaturatedError
from longleaf.gateway.admission.demand import NeverFitsError
from longleaf.gateway.admission.intake import Intake, Ticket
from longleaf.gateway.api import client, errors
from longleaf.gateway.api.answers import ErrorResponse, headers_downstream
from longleaf.gateway.api.body import with_rid
from longleaf.gateway.api.comments import COMMENT, Comments
from longleaf.gateway.api.details import (
    LAST_BYTES,
    SPEC_FIELD,
    Tail,
    details,
    numbers,
    with_chunk,
    with_field,
)
from longleaf.gateway.api.reception import Reception
from longleaf.gateway.api.refusals import REFUSALS, refusal
from longleaf.gateway.api.upstream_errors import from_replica, worth_another_replica
from longleaf.gateway.api.usage import StreamUsage, taken_at_most, taken_unseen
from longleaf.gateway.auth import ApiKey
from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.drain import Drain
from longleaf.gateway.prompts.reader import Prompt
from longleaf.gateway.replicas.client import Body, FailureKind, RawHeaders, ReplicaError
from longleaf.gateway.replicas.exchange import Exchange, Head
from longleaf.gateway.replicas.registry import ReplicaRegistry
from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.request_log import RequestRecord
from longleaf.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_COMMITTED_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), *_STREAM_HEADERS]


@dataclass(slots=True)
class Call:
    """One generation request, valid and ready to forward."""

    path: str
    prompt: Prompt
    headers: RawHeaders
    record: RequestRecord
    key: ApiKey | None
    details: bool = False
    """Whether the answer is to tell how it came about."""


@dataclass(frozen=True, slots=True)
class Relay:
    """What every relayed request needs."""

    config: GatewayConfig
    registry: ReplicaRegistry
    intake: Intake
    drain: Drain
    metrics: GatewayMetrics
    reception: Reception

    def no_replica(self) -> errors.ApiError:
        """503: nobody is there to serve it; the next health checks may find somebody."""
        return errors.service_unavailable("No replica is ready.", self.config.health_interval)

    def failed(self, kind: FailureKind) -> errors.ApiError:
        """What a client is told when its replica failed before an event, and no other can."""
        if kind == "first_byte_timeout":
            return errors.upstream_timeout(
                f"The replica sent nothing for {self.config.first_byte_timeout:g} s."
            )
        if kind == "bad_answer":
            return errors.bad_upstream_answer("The replica gave no valid answer.")
        return errors.service_unavailable(
            "The replica went away before it answered.", self.config.health_interval
        )


class RelayResponse(Response):
    """Answers one call, and watches its client from the start.

    Whatever ends it (the last byte, a fault, the client leaving, the drain limit), the upstream
    answer is closed, and aborted on its replica unless it was read to its end.
    """

    def __init__(self, relay: Relay, call: Call) -> None:
        self.background = None  # all that frameworks ask of it: it makes its head itself
        self._relay = relay
        self._call = call
        self._send: Send = _nowhere
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._deadline = 0.0
        self._sent_at = 0.0
        """Loop time at which it went to its latest replica; 0 before."""
        self._comments: Comments | None = None
        self._usage: StreamUsage | None = None
        self._committed = False
        """Whether the client has its status."""
        self._begun = False
        """Whether a replica's first event is there: from then on no other is tried."""
        self._interrupted: errors.ApiError | None = None
        self._client_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay until the answer ends, the client leaves, or draining takes too long."""
        # Frameworks wrap ``send`` in layers that each chunk would pass, to learn what we know.
        self._send = scope.get("longleaf.send", send)
        self._task = asyncio.current_task()
        here: client.Client = scope[client.KEY]
        here.on_leave(self._leave)
        expired = self._relay.drain.expired
        expired.add_done_callback(self._expire)
        if expired.done():
            self._expire(expired)
        error: errors.ApiError | None = None
        try:
            await self._serve()
        except errors.ApiError as refused:
            error = refused
        except asyncio.CancelledError:
            ours = self._client_left or self._interrupted is not None
            task, self._task = self._task, None
            if not ours or task is None or task.uncancel() > 0:
                raise
            error = self._interrupted
        except Exception:
            logger.exception("relay failed", extra={"fields": {"rid": self._call.record.rid}})
            error = errors.internal_error()
        finally:
            self._task = None
            here.forget_leave()
            expired.remove_done_callback(self._expire)
            if self._comments is not None:
                self._comments.stop()
        if self._client_left:
            self._call.record.status, self._call.record.reason = 499, "client_left"
        elif error is not None:
            await self._refuse(error, scope, receive)

    def _leave(self) -> None:
        if self._task is not None:
            self._client_left = True
            self._task.cancel()

    def _expire(self, _: "asyncio.Future[None]") -> None:
        if self._task is not None:
            self._interrupted = errors.service_unavailable("The gateway is shutting down.", 1.0)
            self._task.cancel()

    async def _refuse(self, error: errors.ApiError, scope: Scope, receive: Receive) -> None:
        if not self._committed:
            await ErrorResponse(error)(scope, receive, self._send)
            return
        self._call.record.reason = error.reason
        await self._send({"type": "http.response.body", "body": error.event()})

    async def _serve(self) -> None:
        relay, call = self._relay, self._call
        began = self._loop.time()
        try:
            ticket = await relay.intake.enter(call.prompt, call.key)
        except REFUSALS as error:
            model = call.prompt.inspection.model
            raise refusal(error, model, relay.config.health_interval) from error
        now = self._loop.time()
        call.record.queue_seconds = now - began
        call.record.prompt_tokens = ticket.ask.demand.prompt_tokens
        call.record.prompt_bytes = ticket.ask.demand.bound
        self._deadline = now + relay.config.first_byte_timeout
        if call.prompt.inspection.stream:
            self._comments = Comments(relay.config.silence_before_comment, self._comment)
            self._comments.start()
        try:
            await self._try_replicas(ticket)
        finally:
            if not self._begun:  # a client that left has cost its prefill
                seconds = self._loop.time() - self._sent_at if self._sent_at else 0.0
                stream = call.prompt.inspection.stream
                taken = taken_unseen(ticket, stream, seconds) if self._client_left else 0
                ticket.charge.settle(taken)

    async def _comment(self) -> None:
        """The stream has been silent for long: say that it lives, in status 200 from now on."""
        if not self._committed:
            self._committed = True
            start = {"status": 200, "headers": _COMMITTED_HEADERS}
            await self._send({"type": "http.response.start", **start})
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def _try_replicas(self, ticket: Ticket) -> None:
        """Answer from the first replica that can, as long as none has sent an event."""
        relay, call = self._relay, self._call
        said = call.prompt.inspection
        more = SPEC_FIELD if call.details else b""
        if said.stream and ticket.charge.matters:
            self._usage = StreamUsage(hidden=said.usage_options is not None)
            if said.usage_options is not None:
                more += b',"stream_options":' + said.usage_options.encode()
        if call.key is not None and (ticket.ask.priority or said.priority is not None):
            more += b',"priority":%d' % ticket.ask.priority
        body = with_rid(call.prompt.text, call.record.rid, more)
        tried: list[Replica] = []
        told: errors.ApiError | None = None
        while True:
            replica = ticket.grant.replica
            tried.append(replica)
            call.record.replica, call.record.attempts = replica.url, len(tried)
            with ticket.grant:
                try:
                    await self._try(ticket, body)
                    return
                except ReplicaError as failure:
                    if self._begun:
                        message = "The replica went away in the middle of the answer."
                        raise errors.stream_interrupted(message) from failure
                    failed = relay.failed(failure.kind)
                    if failure.kind == "first_byte_timeout":  # the time of all attempts is up
                        raise failed from failure
                except errors.ApiError as error:
                    if not worth_another_replica(error):
                        raise
                    failed = error
            if told is None or told.status != 429:  # full is worth more than gone
                told = failed
            if len(tried) >= relay.config.max_attempts:
                raise told
            try:
                ticket = await relay.intake.again(ticket, tried)
            except (NoReplicaError, SaturatedError, NeverFitsError):
                raise told from None
            relay.metrics.retries.inc()

    async def _try(self, ticket: Ticket, body: Body) -> None:
        call, replica = self._call, ticket.grant.replica
        sent = self._sent_at = self._loop.time()
        idle = self._relay.config.idle_timeout
        with Exchange(replica, call.record.rid, self._deadline, idle) as exchange:
            head = await exchange.begin(call.path, body, call.headers)
            if head.error is not None:
                replica.count_error("refused")
                raise from_replica(head.error, head.status, call.prompt.inspection.names, replica)
            self._begun = True
            ticket.grant.reservation.prefilled()
            call.record.note_first_event(self._loop.time() - sent)
            if not head.streaming:
                await self._send_whole(head, ticket)
                return
            tail = Tail()
            tail.add(head.first[-LAST_BYTES:])
            try:
                await self._send_stream(head, exchange, tail)
            finally:
                self._note_usage(ticket, tail.numbers())

    async def _send_stream(self, head: Head, exchange: Exchange, tail: Tail) -> None:
        send, comments, call, usage = self._send, self._comments, self._call, self._usage
        if not self._committed:
            self._committed = True
            await _send_start(send, head)
        piece: bytes | None = head.first
        while piece is not None:
            if usage is not None:
                piece = usage.passed(piece)
            if call.details and exchange.done:
                piece = with_chunk(piece, head.first, details(call.record, tail.numbers()))
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if comments is not None:
                comments.said = exchange.asked
            piece = await exchange.next_piece()
            if piece is not None:
                tail.add(piece if len(piece) <= LAST_BYTES else piece[-LAST_BYTES:])
        await send({"type": "http.response.body", "body": b""})

    async def _send_whole(self, head: Head, ticket: Ticket) -> None:
        body = head.first
        told = numbers(body[-LAST_BYTES:])
        self._note_usage(ticket, told)
        if self._call.details:
            body = with_field(body, details(self._call.record, told))
        if self._call.prompt.inspection.stream:
            raise errors.bad_upstream_answer("The replica gave no stream.")
        self._committed = True
        length = (b"content-length", b"%d" % len(body))
        headers = [*headers_downstream(head.headers), length]
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _note_usage(self, ticket: Ticket, told: Mapping[str, float]) -> None:
        """Settle what the key was charged: by the usage that the answer tells, or else by what of a
        stream has passed.
        """
        prompt, completion = told.get("prompt_tokens"), told.get("completion_tokens")
        if prompt is not None and completion is not None:
            record = self._call.record
            record.prompt_tokens, record.completion_tokens = int(prompt), int(completion)
            ticket.charge.settle(int(prompt + completion))
        elif self._usage is not None:
            commit_len = ticket.grant.replica.budget.steps.commit_len
            ticket.charge.settle(taken_at_most(ticket, self._usage.estimate(commit_len)))


async def _nowhere(_: object) -> None:
    """Stands for ``send`` until there is one."""


async def _send_start(send: Send, head: Head) -> None:
    kept = [
        (name, value)
        for name, value in headers_downstream(head.headers)
        if name != b"cache-control"
    ]
    headers = kept + _STREAM_HEADERS
    await send({"type": "http.response.start", "status": head.status, "headers": headers})
