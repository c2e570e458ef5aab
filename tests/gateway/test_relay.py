import asyncio
import json

import pytest

from tests.gateway.faulty_replica import (
    DONE,
    Received,
    answer_captured_chat,
    captured_body,
    event,
)
from tests.gateway.running import chat, eventually, gateway_over

pytestmark = pytest.mark.anyio


async def test_streamed_answer_is_what_the_replica_sent() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        status, body, _ = await gateway.raw(chat(stream=True))
        assert status == 200
        assert body == captured_body("chat_stream")


async def test_whole_answer_is_what_the_replica_sent() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        _, body, response = await gateway.raw(chat())
        assert body == captured_body("chat")
        assert response.headers["content-length"] == str(len(body))
        assert response.headers["content-type"] == "application/json"


async def test_completions_are_relayed_too() -> None:
    async def behaviour(request: Received) -> None:
        await request.replay("completions")

    async with gateway_over(behaviour) as (gateway, replicas):
        body = {"model": "tiny", "prompt": "hello"}
        async with gateway.post(body, "/v1/completions") as response:
            assert await response.read() == captured_body("completions")
        assert replicas[0].generations[0].path == "/v1/completions"


async def test_stream_headers_forbid_caching_and_buffering() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        headers = {"accept-encoding": "gzip, br"}
        async with gateway.post(chat(stream=True), headers=headers) as response:
            await response.read()
            assert response.headers.getall("cache-control") == ["no-cache"]
            assert response.headers.getall("x-accel-buffering") == ["no"]
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert "content-encoding" not in response.headers
            assert "server" not in response.headers


async def test_chunk_leaves_before_the_next_one_comes() -> None:
    seen = asyncio.Queue[int]()
    events = [event(f"token {number}") for number in range(20)]

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        for number, piece in enumerate(events):
            await request.chunk(piece)
            assert await seen.get() == number  # only then is the next one written
        await request.chunk(DONE)
        await request.end_stream()

    async with gateway_over(behaviour) as (gateway, _), gateway.post(chat(stream=True)) as response:
        for number, piece in enumerate(events):
            assert await response.content.readexactly(len(piece)) == piece
            seen.put_nowait(number)
        assert await response.read() == DONE


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_events_cut_anywhere_arrive_whole(size: int) -> None:
    """Chunks of one byte cut UTF-8 sequences and event borders at every place."""
    whole = event("né") + event("漢字 🌲") + event("end") + DONE

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        for start in range(0, len(whole), size):
            await request.chunk(whole[start : start + size])
            await asyncio.sleep(0)
        await request.end_stream()

    async with gateway_over(behaviour) as (gateway, _):
        assert (await gateway.raw(chat(stream=True)))[1] == whole


async def test_comments_before_the_first_event_are_kept() -> None:
    whole = b": waiting\n\n" + event() + DONE

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(b": waiting\n\n")
        await request.chunk(event())
        await request.chunk(DONE)
        await request.end_stream()

    async with gateway_over(behaviour) as (gateway, _):
        assert (await gateway.raw(chat(stream=True)))[1] == whole


async def test_error_event_in_mid_stream_passes_untouched() -> None:
    failure = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event())
        await request.chunk(failure + DONE)
        await request.end_stream()

    async with gateway_over(behaviour) as (gateway, _):
        status, body, _ = await gateway.raw(chat(stream=True))
        assert (status, body) == (200, event() + failure + DONE)


@pytest.mark.parametrize(
    "pieces",
    [
        (event() + DONE, event("late")),
        (event() + DONE + event("late"),),
        (event(), DONE, b": bye\n\n"),
    ],
)
@pytest.mark.parametrize("details", [False, True])
async def test_what_comes_after_done_is_no_fault(pieces: tuple[bytes, ...], details: bool) -> None:
    async def behaviour(request: Received) -> None:
        await request.start_stream()
        for piece in pieces:
            await request.chunk(piece)
        await request.end_stream()

    async with gateway_over(behaviour) as (gateway, (replica,)):
        headers = {"x-longleaf-details": "true"} if details else {}
        status, body, _ = await gateway.raw(chat(stream=True), headers=headers)
        before, _, after = b"".join(pieces).partition(DONE)
        assert status == 200
        assert body.startswith(before)
        assert body.endswith(DONE + after)
        assert b'"error"' not in body
        assert replica.aborted.empty()


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("before", [b"", event("y")])
async def test_a_stream_that_ends_with_its_own_error_gets_no_second_one(
    cut: bool, before: bytes
) -> None:
    failure = b'data: {"error": {"message": "out of memory", "code": 500}}\r\n\r\n'

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event())
        await request.chunk(before + failure)
        if not cut:
            await request.end_stream()

    async with gateway_over(behaviour) as (gateway, _):
        status, body, _ = await gateway.raw(chat(stream=True))
        assert (status, body) == (200, event() + before + failure)


async def test_a_stream_that_is_answered_whole_is_502() -> None:
    async def behaviour(request: Received) -> None:
        await request.replay("chat")

    async with gateway_over(behaviour) as (gateway, _):
        status, body, _ = await gateway.answer(chat(stream=True))
        assert (status, body["error"]["code"]) == (502, "bad_upstream_answer")


async def test_unknown_fields_are_forwarded_untouched() -> None:
    text = (
        b' {"model":"tiny",  "messages":[{"role":"user","content":"\\u00e9 \\n"}], '
        b'"stream_options":{"include_usage":true,"x":1e400}, "my_field":{"a":[1.0,1e2,null]},'
        b'"return_spec_tokens_details":true,"seed":18446744073709551617 }\n'
    )
    text = text.replace(b"1e400", b"1.50")
    async with gateway_over(answer_captured_chat) as (gateway, replicas):
        url = gateway.url + "/v1/chat/completions"
        async with gateway.http.post(url, data=text) as response:
            assert response.status == 200
        received = replicas[0].generations[0]
        rid = received.json["rid"]
        assert received.body == text.rstrip()[:-1] + b',"rid":"' + rid.encode() + b'"}'
        assert {**json.loads(text), "rid": rid} == received.json


async def test_clients_cannot_choose_the_id_that_the_engine_aborts_by() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, replicas):
        await gateway.answer(chat(rid="a"), headers={"x-request-id": "b"})
        received = replicas[0].generations[0]
        rid = received.json["rid"]
        assert len(rid) == 32
        assert int(rid, 16) >= 0


async def test_request_id_is_ours_unless_the_client_sends_one() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, replicas):
        _, _, response = await gateway.answer(chat())
        received = replicas[0].generations[0]
        assert response.headers["x-request-id"] == received.json["rid"]
        assert received.header("x-request-id") == received.json["rid"]

        _, _, response = await gateway.answer(chat(), headers={"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        assert replicas[0].generations[1].header("x-request-id") == "mine-1"

        _, _, response = await gateway.answer(chat(), headers={"x-request-id": "x" * 129})
        assert response.headers["x-request-id"] == replicas[0].generations[2].json["rid"]


async def test_only_end_to_end_headers_are_forwarded() -> None:
    sent = {
        "authorization": "Bearer client-secret",
        "cookie": "a=b",
        "connection": "keep-alive, x-hop",
        "x-hop": "1",
        "te": "trailers",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-custom": "kept",
        "accept-encoding": "gzip",
    }
    async with gateway_over(answer_captured_chat, upstream_api_key="upstream") as (
        gateway,
        replicas,
    ):
        await gateway.answer(chat(), headers=sent)
        received = replicas[0].generations[0]
        assert received.header("authorization") == "Bearer upstream"
        assert received.header("accept-encoding") == "identity"
        assert received.header("traceparent") == sent["traceparent"]
        assert received.header("x-custom") == "kept"
        assert [received.header(name) for name in ("cookie", "x-hop", "te")] == [None] * 3
        assert b"client-secret" not in received.body


async def test_requests_take_turns() -> None:
    async with gateway_over(answer_captured_chat, answer_captured_chat) as (gateway, replicas):
        for _ in range(6):
            await gateway.answer(chat())
        assert [len(replica.generations) for replica in replicas] == [3, 3]


@pytest.mark.parametrize("routing", ["expected_cost", "prefix", "kv_pressure"])
async def test_the_busy_replica_is_avoided(routing: str) -> None:
    release = asyncio.Event()

    async def behaviour(request: Received) -> None:
        if request.json.get("user") == "long":
            await release.wait()
        await request.replay("chat")

    async with gateway_over(behaviour, behaviour, routing=routing) as (gateway, replicas):
        long = asyncio.create_task(gateway.answer(chat(user="long")))
        busy, free = replicas
        await eventually(lambda: busy.generations or free.generations)
        if free.generations:
            busy, free = free, busy
        for _ in range(4):
            await gateway.answer(chat())
        assert [len(busy.generations), len(free.generations)] == [1, 4]
        release.set()
        assert (await long)[0] == 200
