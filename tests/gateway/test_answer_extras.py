"""Comment lines, the extension of answers, the log line, traces."""

import asyncio
import json
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.tracing import Tracing
from tests.gateway.faulty_replica import (
    DONE,
    FaultyReplica,
    Received,
    answer_captured_chat,
    captured_body,
    event,
)
from tests.gateway.running import chat, eventually, gateway_over, running_gateway
from tests.gateway.test_requests import error_of

pytestmark = pytest.mark.anyio

COMMENT = b": waiting\n\n"
DETAILS = {"x-longleaf-details": "true"}


async def test_a_silent_stream_commits_and_gets_comment_lines() -> None:
    release = asyncio.Event()

    async def behaviour(request: Received) -> None:
        await release.wait()
        await request.start_stream()
        await request.chunk(event("first") + DONE)
        await request.end_stream()

    async with (
        gateway_over(behaviour, silence_before_comment=0.1) as (gateway, _),
        gateway.post(chat(stream=True)) as response,
    ):
        assert response.status == 200  # although no replica has said a word
        assert response.content_type == "text/event-stream"
        assert await response.content.readexactly(2 * len(COMMENT)) == COMMENT * 2
        release.set()
        assert (await response.read()).replace(COMMENT, b"") == event("first") + DONE


async def test_silence_in_mid_stream_gets_comment_lines_too() -> None:
    release = asyncio.Event()

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("first"))
        await release.wait()
        await request.chunk(event("second") + DONE)
        await request.end_stream()

    async with (
        gateway_over(behaviour, silence_before_comment=0.1) as (gateway, _),
        gateway.post(chat(stream=True)) as response,
    ):
        first = event("first")
        assert await response.content.readexactly(len(first)) == first
        assert await response.content.readexactly(len(COMMENT)) == COMMENT
        release.set()
        rest = (await response.read()).replace(COMMENT, b"")
        assert rest == event("second") + DONE


async def test_after_the_commitment_an_error_is_an_event() -> None:
    async def behaviour(request: Received) -> None:
        await asyncio.sleep(0.3)
        await request.replay("err_overlong_chat")

    async with gateway_over(behaviour, silence_before_comment=0.1) as (gateway, _):
        status, body, _ = await gateway.raw(chat(stream=True))
        assert status == 200
        assert body.startswith(COMMENT)
        assert error_of(json.loads(body.rpartition(b"data: ")[2]))["code"] == (
            "context_length_exceeded"
        )


async def test_a_commitment_does_not_stop_the_retry() -> None:
    async def die_late(request: Received) -> None:
        await asyncio.sleep(0.3)
        request.reset()

    async with gateway_over(die_late, answer_captured_chat, silence_before_comment=0.1) as (
        gateway,
        _,
    ):
        status, body, _ = await gateway.raw(chat(stream=True))
        assert (status, body.replace(COMMENT, b"")) == (200, captured_body("chat_stream"))


async def test_whole_answers_get_no_comments() -> None:
    async def behaviour(request: Received) -> None:
        await asyncio.sleep(0.3)
        await request.replay("chat")

    async with gateway_over(behaviour, silence_before_comment=0.05) as (gateway, _):
        assert (await gateway.raw(chat()))[:2] == (200, captured_body("chat"))


FIGURES = {"spec_accept_length": 3.5, "spec_verify_ct": 12}


async def with_figures(request: Received) -> None:
    assert request.json["return_spec_tokens_details"] is True
    assert request.header("x-longleaf-details") is None
    if request.json.get("stream"):
        last = {"id": "c", "choices": [], "sglext": {"spec_tokens_details": FIGURES}}
        await request.start_stream()
        await request.chunk(event("first"))
        await request.chunk(b"data: " + json.dumps(last).encode() + b"\n\n" + DONE)
        await request.end_stream()
    else:
        await request.answer(200, json.dumps({"id": "c", "sglext": FIGURES}).encode())


async def test_extension_of_a_whole_answer() -> None:
    async with gateway_over(with_figures) as (gateway, (replica,)):
        _, body, _ = await gateway.answer(chat(), headers=DETAILS)
        told = body.pop("longleaf")
        assert body == {"id": "c", "sglext": FIGURES}
        assert told.pop("queue_seconds") >= 0
        assert told == {
            "replica": replica.url,
            "attempts": 1,
            "prefill_seconds": None,
            "commit_len": 3.5,
            "steps": 12,
        }


async def test_extension_of_a_stream_is_its_last_chunk() -> None:
    async with gateway_over(with_figures) as (gateway, (replica,)):
        _, body, _ = await gateway.raw(chat(stream=True), headers=DETAILS)
        chunks = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
        assert chunks[-1] == b"[DONE]"
        assert json.loads(chunks[0]) == json.loads(event("first")[6:])
        chunk = json.loads(chunks[-2])
        common = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
        assert chunk == {**common, "choices": [], "longleaf": chunk["longleaf"]}
        told = chunk["longleaf"]
        assert (told["commit_len"], told["steps"], told["replica"]) == (3.5, 12, replica.url)
        assert told["prefill_seconds"] > 0


async def test_no_extension_unless_asked_for() -> None:
    async def behaviour(request: Received) -> None:
        assert "return_spec_tokens_details" not in request.json
        await request.replay("chat")

    async with gateway_over(behaviour) as (gateway, _):
        assert (await gateway.raw(chat()))[1] == captured_body("chat")


async def test_times_are_observed_by_context() -> None:
    async def behaviour(request: Received) -> None:
        usage = {"prompt_tokens": 20_000, "completion_tokens": 5, "total_tokens": 20_005}
        await request.start_stream()
        await request.chunk(event("first"))
        await request.chunk(event("", choices=[], usage=usage) + DONE)
        await request.end_stream()

    async with gateway_over(behaviour) as (gateway, _):
        assert (await gateway.raw(chat(stream=True)))[0] == 200
        await eventually(lambda: gateway.server.drain.running == 0)
        for family in ("ttft_seconds", "time_per_token_seconds", "e2e_seconds"):
            sample = f'longleaf_gateway_{family}_count{{context_bucket="32k"}}'
            assert await gateway.metric(sample) == 1


SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_without_tracing_the_context_passes_untouched() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        await gateway.raw(chat(), headers={"traceparent": SPAN, "tracestate": "a=b"})
        (received,) = replica.generations
        assert (received.header("traceparent"), received.header("tracestate")) == (SPAN, "a=b")


async def test_trace_goes_from_the_client_through_us_to_the_replica(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "longleaf.gateway.request")
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    secret = "a very secret prompt"
    messages = [{"role": "user", "content": secret}]
    async with FaultyReplica() as replica:
        async with running_gateway(replica.url, ready=1, tracing=Tracing(provider)) as gateway:
            body = chat(stream=True, messages=messages)
            await gateway.raw(body, headers={"traceparent": SPAN, "tracestate": "a=b"})
            await gateway.raw(chat(model="unknown"))
            await eventually(lambda: gateway.server.drain.running == 0)
        (received,) = replica.generations
    span, refused = spans.get_finished_spans()
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    context = span.get_span_context()
    assert context is not None
    expected = f"00-0af7651916cd43dd8448eb211c80319c-{context.span_id:016x}-01"
    assert received.header("traceparent") == expected
    assert received.header("tracestate") == "a=b"
    assert span.attributes is not None
    assert span.attributes["longleaf.replica"] == replica.url
    assert span.attributes["http.response.status_code"] == 200
    assert refused.attributes is not None
    assert refused.attributes["longleaf.reason"] == "model_not_found"
    assert refused.parent is None
    lines = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert lines[0]["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert secret not in span.to_json() + json.dumps(lines)


async def test_traces_reach_an_otlp_endpoint() -> None:
    async def collect(request: Received) -> None:
        await request.answer(200, b"", "content-type: application/x-protobuf\r\n")

    async with FaultyReplica() as replica, FaultyReplica(collect) as collector:
        async with running_gateway(
            replica.url, ready=1, otlp_endpoint=collector.url + "/v1/traces"
        ) as gateway:
            await gateway.raw(chat())
        (sent,) = collector.generations
    assert sent.path == "/v1/traces"
    assert b"chat_completions" in sent.body
    assert b"longleaf-gateway" in sent.body


def test_configuration_knows_no_tracing_without_an_endpoint() -> None:
    assert GatewayConfig(replicas=("http://a:1",)).otlp_endpoint is None
