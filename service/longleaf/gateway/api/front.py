"""What every request passes first: ids, the API key, draining, metrics and the log line."""

import logging
import os
import re
import time
from collections.abc import Awaitable, Mapping
from functools import cache
from types import MappingProxyType

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longleaf.gateway.api import errors
from longleaf.gateway.api.answers import ErrorResponse
from longleaf.gateway.auth import KeyRing
from longleaf.gateway.drain import Drain
from longleaf.gateway.request_log import RequestRecord
from longleaf.gateway.tracing import Tracing
from longleaf.metrics import GatewayMetrics, context_bucket

logger = logging.getLogger(__name__)

_ROUTES: Mapping[str, str] = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/admission": "admission",
    "/v1/models": "models",
    "/livez": "livez",
    "/readyz": "readyz",
    "/openapi.json": "openapi",
}
_OPEN = frozenset({"livez", "readyz", "openapi"})
_WORK = frozenset({"chat_completions", "completions", "admission"})
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Front:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing | None,
        drain: Drain,
        metrics: GatewayMetrics,
        direct: Mapping[str, ASGIApp] = MappingProxyType({}),
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._app = app
        self._direct = direct
        """What answers a POST to a path without the framework."""
        self._keys = keys
        self._drain = drain
        self._in_flight = metrics.in_flight
        self._running: dict[str, int] = {}
        """Requests by route."""
        # A series is looked up by its labels once, not at every request.
        self._requests = cache(metrics.requests.labels)
        self._request_seconds = cache(metrics.request_seconds.labels)
        self._first_byte_seconds = cache(metrics.first_byte_seconds.labels)
        self._e2e_seconds = cache(metrics.e2e_seconds.labels)
        self._ttft_seconds = cache(metrics.ttft_seconds.labels)
        self._token_seconds = cache(metrics.token_seconds.labels)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; everything else (lifespan) passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _record(scope)
        scope["longleaf.record"] = record
        tracing = self._tracing if record.route in _WORK else None
        span = None if tracing is None else tracing.begin(scope, record)
        answer = _Answer(record, send).send
        scope["longleaf.send"] = answer
        self._begin(record.route)
        try:
            refusal = self._refusal(scope, record.route)
            if refusal is not None:
                await ErrorResponse(refusal)(scope, receive, answer)
            elif record.route in _WORK:
                app = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
                with self._drain:
                    await (app or self._app)(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except ClientDisconnect:
            record.status, record.reason = 499, "client_left"
        except Exception:
            logger.exception("request failed", extra={"fields": {"rid": record.rid}})
            record.reason = "internal_error"
            if not record.status:
                await ErrorResponse(errors.internal_error())(scope, receive, answer)
        finally:
            self._running[record.route] -= 1
            self._finish(record)
            if tracing is not None and span is not None:
                tracing.end(span, record)

    def refuse(self, error: errors.ApiError) -> None:
        """Count what was refused before it was a request."""
        rid = os.urandom(16).hex()
        record = RequestRecord(rid, rid, "", "other", status=error.status, reason=error.reason)
        self._finish(record)

    def _refusal(self, scope: Scope, route: str) -> errors.ApiError | None:
        scope["longleaf.key"] = None
        if self._keys is not None and route not in _OPEN:
            authorization = _header(scope, b"authorization") or b""
            key = self._keys.find(authorization.decode("latin-1"))
            if key is None:
                return errors.invalid_api_key()
            scope["longleaf.key"] = key
        if self._drain.draining and route in _WORK:
            refusal = errors.service_unavailable("The gateway is shutting down.", 1.0)
            refusal.headers = {**refusal.headers, "connection": "close"}
            return refusal
        return None

    def _begin(self, route: str) -> None:
        running = self._running
        if route not in running:
            running[route] = 0
            self._in_flight.labels(route).set_function(lambda: running[route])
        running[route] += 1

    def _finish(self, record: RequestRecord) -> None:
        ended = time.perf_counter()
        route = record.route
        self._requests(route, str(record.status), record.reason).inc()
        self._request_seconds(route).observe(ended - record.started)
        if record.first_byte is not None:
            self._first_byte_seconds(route).observe(record.first_byte - record.started)
        if record.first_event is not None and record.reason == "ok":
            self._observe_generation(record, record.first_event, ended)
        record.write(ended)

    def _observe_generation(self, record: RequestRecord, first: float, ended: float) -> None:
        bucket = context_bucket(record.context_tokens)
        self._e2e_seconds(bucket).observe(ended - record.started)
        if record.stream:
            self._ttft_seconds(bucket).observe(first - record.started)
            further = (record.completion_tokens or 0) - 1
            if further > 0:
                self._token_seconds(bucket).observe((ended - first) / further)


class _Answer:
    """``send`` that notes what was sent, and puts the request id on the answer."""

    __slots__ = ("_record", "_send")

    def __init__(self, record: RequestRecord, send: Send) -> None:
        self._record = record
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI's."""
        record = self._record
        if message["type"] == "http.response.body":
            body = message.get("body")
            if body:
                if record.first_byte is None:
                    record.first_byte = time.perf_counter()
                record.sent_bytes += len(body)
        elif message["type"] == "http.response.start":
            record.status = message["status"]
            identity = (b"x-request-id", record.request_id.encode())
            message["headers"] = [*message.get("headers", ()), identity]
        return self._send(message)


def _record(scope: Scope) -> RequestRecord:
    path: str = scope["path"]
    route = _ROUTES.get(path) or ("models" if path.startswith("/v1/models/") else "other")
    rid = os.urandom(16).hex()
    given = _header(scope, b"x-request-id")
    usable = given is not None and _REQUEST_ID.fullmatch(given) is not None
    request_id = given.decode() if given is not None and usable else rid
    return RequestRecord(rid, request_id, scope["method"], route)


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None
