"""OpenTelemetry traces: a span for each request, the W3C context taken from the client and handed
to the replica. Optional: without an endpoint the client's context passes through untouched.

Spans carry sizes, times and ids; never a word of a prompt or an answer.
"""

from typing import Protocol

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from longleaf import __version__
from longleaf.gateway.request_log import RequestRecord

_CONTEXT = frozenset({b"traceparent", b"tracestate"})


class Provider(Protocol):
    """What is needed of an SDK's tracer provider."""

    def get_tracer(self, name: str, version: str) -> Tracer:
        """The tracer of one library."""
        ...

    def shutdown(self) -> None:
        """Send what is held, then end."""
        ...


class Tracing:
    """Makes the spans."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("longleaf.gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_endpoint(cls, endpoint: str) -> "Tracing":
        """Traces that go to an OTLP/HTTP endpoint. ``ValueError`` where the SDK is missing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ValueError(
                f"otlp_endpoint needs what `pip install longleaf[tracing]` installs: {error}"
            ) from error
        resource = Resource.create({"service.name": "longleaf-gateway"})
        provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=endpoint)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def begin(self, scope: Scope, record: RequestRecord) -> Span:
        """The span of a request, child of the client's. The replica will see it as its parent."""
        given = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _CONTEXT
        }
        span = self._tracer.start_span(
            f"{record.method} {record.route}",
            self._propagator.extract(given),
            SpanKind.SERVER,
            {"http.request.method": record.method, "longleaf.request_id": record.request_id},
        )
        ours: dict[str, str] = {}
        self._propagator.inject(ours, set_span_in_context(span))
        scope["headers"] = [
            *(header for header in scope["headers"] if header[0] not in _CONTEXT),
            *((name.encode(), value.encode("latin-1")) for name, value in ours.items()),
        ]
        record.trace_id = f"{span.get_span_context().trace_id:032x}"
        return span

    def end(self, span: Span, record: RequestRecord) -> None:
        """The request is over."""
        told: dict[str, int | float | str | None] = {
            "http.response.status_code": record.status,
            "longleaf.reason": record.reason,
            "longleaf.replica": record.replica,
            "longleaf.attempts": record.attempts,
            "longleaf.prompt_tokens": record.prompt_tokens,
            "longleaf.completion_tokens": record.completion_tokens,
            "longleaf.queue_seconds": record.queue_seconds,
            "longleaf.prefill_seconds": record.prefill_seconds,
        }
        span.set_attributes({name: value for name, value in told.items() if value is not None})
        if record.status >= 500 or record.reason == "stream_interrupted":
            span.set_status(Status(StatusCode.ERROR, record.reason))
        span.end()

    def close(self) -> None:
        """Send what is held; blocks for as long as that takes."""
        self._provider.shutdown()
