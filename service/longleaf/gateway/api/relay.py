"""Relay: one generation request from admission to its last byte.

The status is chosen only when the first event is there, since engines report errors inside streams
of status 200. Until then another replica may be tried and the client sees nothing of it.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longleaf.gateway.admission.admission import NoReplicaError, SaturatedError
from longleaf.gateway.admission.demand import NeverFitsError
from longleaf.gateway.admission.intake import Intake, Ticket
from longleaf.gateway.api import errors
from longleaf.gateway.api.answers import ErrorResponse, headers_downstream
from longleaf.gateway.api.body import with_rid
from longleaf.gateway.api.refusals import REFUSALS, refusal
from longleaf.gateway.api.upstream_errors import from_replica, worth_another_replica
from longleaf.gateway.auth import ApiKey
from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.drain import Drain
from longleaf.gateway.prompts.reader import Prompt
from longleaf.gateway.replicas.client import Body, FailureKind, ReplicaError
from longleaf.gateway.replicas.exchange import Exchange, Head
from longleaf.gateway.replicas.registry import ReplicaRegistry
from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.request_log import RequestRecord
from longleaf.metrics import GatewayMetrics

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d{1,9})')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens": ?(\d{1,9})')
_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


@dataclass(frozen=True, slots=True)
class Call:
    """One generation request, valid and ready to forward."""

    path: str
    prompt: Prompt
    headers: list[tuple[str, str]]
    record: RequestRecord
    key: ApiKey | None


@dataclass(frozen=True, slots=True)
class Relay:
    """What every relayed request needs."""

    config: GatewayConfig
    registry: ReplicaRegistry
    intake: Intake
    drain: Drain
    metrics: GatewayMetrics

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
        super().__init__()
        self._relay = relay
        self._call = call
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay until the answer ends, the client leaves, or draining takes too long."""
        record = self._call.record
        serving = asyncio.ensure_future(self._serve(send))
        leaving = asyncio.ensure_future(_client_leaves(receive))
        expired = self._relay.drain.expired
        try:
            await asyncio.wait({serving, leaving, expired}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            client_left = leaving.done() and not serving.done()
            for task in (serving, leaving):
                task.cancel()
            await asyncio.wait({serving, leaving})
        if not serving.cancelled():
            serving.exception()
        if client_left:
            record.status, record.reason = 499, "client_left"
            return
        if serving.cancelled():
            error: BaseException | None = errors.service_unavailable(
                "The gateway is shutting down.", 1.0
            )
        else:
            error = serving.exception()
        if isinstance(error, errors.ApiError):
            await self._refuse(error, scope, receive, send)
        elif error is not None:
            raise error

    async def _refuse(
        self, error: errors.ApiError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not self._started:
            await ErrorResponse(error)(scope, receive, send)
            return
        self._call.record.reason = error.reason
        await send({"type": "http.response.body", "body": error.event()})

    async def _serve(self, send: Send) -> None:
        relay, call = self._relay, self._call
        try:
            ticket = await relay.intake.enter(call.prompt, call.key)
        except REFUSALS as error:
            model = call.prompt.inspection.model
            raise refusal(error, model, relay.config.health_interval) from error
        call.record.prompt_tokens = ticket.ask.demand.prompt_tokens
        try:
            await self._try_replicas(ticket, send)
        finally:
            if not self._started:
                ticket.charge.settle(0)

    async def _try_replicas(self, ticket: Ticket, send: Send) -> None:
        """Answer from the first replica that can, as long as none has sent an event."""
        relay, call = self._relay, self._call
        body = with_rid(call.prompt.text, call.record.rid)
        tried: list[Replica] = []
        told: errors.ApiError | None = None
        while True:
            replica = ticket.grant.replica
            tried.append(replica)
            call.record.replica, call.record.attempts = replica.url, len(tried)
            with ticket.grant:
                try:
                    await self._try(ticket, body, send)
                    return
                except ReplicaError as failure:
                    if self._started:
                        message = "The replica went away in the middle of the answer."
                        raise errors.stream_interrupted(message) from failure
                    failed = relay.failed(failure.kind)
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

    async def _try(self, ticket: Ticket, body: Body, send: Send) -> None:
        config, call, replica = self._relay.config, self._call, ticket.grant.replica
        async with Exchange(
            replica, call.record.rid, config.first_byte_timeout, config.idle_timeout
        ) as exchange:
            head = await exchange.begin(call.path, body, call.headers)
            if head.error is not None:
                replica.count_error("refused")
                raise from_replica(head.error, head.status, call.prompt.inspection.names, replica)
            self._started = True
            ticket.grant.reservation.prefilled()
            usage = _UsageReader(ticket)
            usage.read(head.first)
            if not head.streaming:
                await _send_whole(send, head)
                return
            await _send_start(send, head)
            await send({"type": "http.response.body", "body": head.first, "more_body": True})
            while (piece := await exchange.next_piece()) is not None:
                usage.read(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _UsageReader:
    """Settles what a key was charged by the usage that the answer tells, where it matters."""

    def __init__(self, ticket: Ticket) -> None:
        self._charge = ticket.charge

    def read(self, piece: bytes) -> None:
        if self._charge.matters and b'"completion_tokens"' in piece:
            completion = _COMPLETION_TOKENS.findall(piece)
            prompt = _PROMPT_TOKENS.findall(piece)
            if completion and prompt:
                self._charge.settle(int(completion[-1]) + int(prompt[-1]))


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_start(send: Send, head: Head) -> None:
    kept = [
        (name, value)
        for name, value in headers_downstream(head.headers)
        if name != b"cache-control"
    ]
    start: Mapping[str, object] = {"status": head.status, "headers": kept + _STREAM_HEADERS}
    await send({"type": "http.response.start", **start})


async def _send_whole(send: Send, head: Head) -> None:
    length = (b"content-length", str(len(head.first)).encode())
    headers = [*headers_downstream(head.headers), length]
    await send({"type": "http.response.start", "status": head.status, "headers": headers})
    await send({"type": "http.response.body", "body": head.first})
