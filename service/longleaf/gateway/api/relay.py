"""Relay: one generation request from admission to its last byte.

The status is chosen only when the first event is there, since engines report errors inside streams
of status 200. Until then another replica may be tried and the client sees nothing of it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longleaf.gateway.admission.context_length import ContextLengthCheck, Demand, NeverFitsError
from longleaf.gateway.api import errors
from longleaf.gateway.api.answers import ErrorResponse, headers_downstream
from longleaf.gateway.api.body import ParsedBody
from longleaf.gateway.api.upstream_errors import from_replica, worth_another_replica
from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.drain import Drain
from longleaf.gateway.replicas.client import FailureKind, ReplicaError
from longleaf.gateway.replicas.exchange import Exchange, Head
from longleaf.gateway.replicas.registry import ReplicaRegistry
from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.request_log import RequestRecord
from longleaf.gateway.routing.policy import RoutingPolicy
from longleaf.metrics import GatewayMetrics

_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


@dataclass(frozen=True, slots=True)
class Call:
    """One generation request, valid and ready to forward."""

    path: str
    body: ParsedBody
    headers: list[tuple[str, str]]
    record: RequestRecord

    def fields(self) -> dict[str, Any]:
        """The body's fields less the other route's prompt, which means nothing on this one."""
        foreign = "prompt" if self.path.endswith("/chat/completions") else "messages"
        return {name: value for name, value in self.body.fields.items() if name != foreign}


@dataclass(frozen=True, slots=True)
class Relay:
    """What every relayed request needs."""

    config: GatewayConfig
    registry: ReplicaRegistry
    policy: RoutingPolicy
    check: ContextLengthCheck
    drain: Drain
    metrics: GatewayMetrics

    async def demand(self, call: Call) -> Demand:
        """What the call asks for; raises where no replica knows the model or could ever hold it."""
        fields = call.fields()
        model = str(fields["model"])
        told = [replica for replica in self.registry.replicas if replica.facts is not None]
        serving = [
            replica
            for replica in told
            if replica.facts is not None and model in replica.facts.model_names
        ]
        if not serving:
            raise errors.model_not_found(model) if told else self.no_replica()
        if not any(replica.ready for replica in serving):
            raise self.no_replica()
        try:
            demand = await self.check.demand(fields, call.body.text, serving)
        except NeverFitsError as error:
            raise errors.context_length_exceeded(str(error), error.param) from None
        call.record.prompt_tokens = demand.prompt_tokens
        return demand

    def choose(self, demand: Demand, tried: list[Replica]) -> Replica | None:
        """A ready replica that could hold the request and has not been tried."""
        candidates = [
            replica
            for replica in self.registry.ready()
            if replica not in tried and demand.fits(replica)
        ]
        return self.policy.choose(candidates, demand) if candidates else None

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
        demand = await relay.demand(call)
        body = call.body.with_rid(call.record.rid)
        tried: list[Replica] = []
        refusal: errors.ApiError | None = None
        while len(tried) < relay.config.max_attempts:
            replica = relay.choose(demand, tried)
            if replica is None:
                break
            if tried:
                relay.metrics.retries.inc()
            tried.append(replica)
            call.record.replica, call.record.attempts = replica.url, len(tried)
            try:
                await self._try(replica, body, send)
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
            if refusal is None or refusal.status != 429:  # full is worth more than gone
                refusal = failed
        raise refusal or relay.no_replica()

    async def _try(self, replica: Replica, body: bytes, send: Send) -> None:
        config, call = self._relay.config, self._call
        async with Exchange(
            replica, call.record.rid, config.first_byte_timeout, config.idle_timeout
        ) as exchange:
            head = await exchange.begin(call.path, body, call.headers)
            if head.error is not None:
                replica.count_error("refused")
                raise from_replica(head.error, head.status, call.fields(), replica)
            self._started = True
            if not head.streaming:
                await _send_whole(send, head)
                return
            await _send_start(send, head)
            await send({"type": "http.response.body", "body": head.first, "more_body": True})
            while (piece := await exchange.next_piece()) is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


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
