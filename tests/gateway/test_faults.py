"""Replicas that die, hang, refuse or talk nonsense."""

import asyncio
import contextlib
import json

import pytest
from prometheus_client import CollectorRegistry

from longleaf.gateway.replicas.budget import ReplicaBudget, Rules
from longleaf.gateway.replicas.client import ReplicaClient, ReplicaError
from longleaf.gateway.replicas.exchange import Exchange
from longleaf.gateway.replicas.replica import Replica
from longleaf.metrics import GatewayMetrics
from tests.gateway.faulty_replica import (
    DONE,
    Behaviour,
    FaultyReplica,
    Received,
    answer_captured_chat,
    captured_body,
    event,
)
from tests.gateway.running import CHAT, LIMIT, chat, gateway_over, running_gateway
from tests.gateway.test_requests import error_of

pytestmark = pytest.mark.anyio

RETRIES = "longleaf_gateway_retries_total"


async def reset_at_once(request: Received) -> None:
    request.reset()


async def reset_after_status(request: Received) -> None:
    await request.start_stream()
    request.reset()


async def reset_in_first_event(request: Received) -> None:
    await request.start_stream()
    await request.chunk(event()[:20])
    request.reset()


async def end_without_event(request: Received) -> None:
    await request.start_stream()
    await request.end_stream()


async def end_without_answer(request: Received) -> None:
    request.writer.close()


async def talk_nonsense(request: Received) -> None:
    await request.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


async def be_unavailable(request: Received) -> None:
    await request.answer(503, b'{"object":"error","message":"Service is shutting down","code":503}')


async def hang(request: Received) -> None:
    await request.until_gone()


async def hang_after_status(request: Received) -> None:
    await request.start_stream()
    await request.until_gone()


async def cut_body(request: Received) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
    request.reset()


BEFORE_FIRST_EVENT = [
    reset_at_once,
    reset_after_status,
    reset_in_first_event,
    end_without_event,
    end_without_answer,
    talk_nonsense,
    be_unavailable,
    hang,
    hang_after_status,
]


HANGS = (hang, hang_after_status)


@pytest.mark.parametrize("fault", BEFORE_FIRST_EVENT)
async def test_death_before_the_first_event_is_retried_invisibly(fault: Behaviour) -> None:
    async with gateway_over(fault, answer_captured_chat, hang_timeout=0.3) as (
        gateway,
        replicas,
    ):
        replicas[0].health_status = 503 if fault in HANGS else 200
        status, body, _ = await gateway.raw(chat(stream=True))
        assert (status, body) == (200, captured_body("chat_stream"))
        assert [len(replica.generations) for replica in replicas] == [1, 1]
        assert await gateway.metric(RETRIES) == 1


@pytest.mark.parametrize("fault", [reset_at_once, end_without_answer, cut_body, hang])
async def test_death_of_a_whole_answer_is_retried_invisibly(fault: Behaviour) -> None:
    async with gateway_over(fault, answer_captured_chat, hang_timeout=0.3) as (gateway, replicas):
        replicas[0].health_status = 503 if fault in HANGS else 200
        status, body, _ = await gateway.raw(chat())
        assert (status, body) == (200, captured_body("chat"))


async def test_replica_that_refuses_connections_is_passed_over() -> None:
    async with gateway_over(answer_captured_chat, answer_captured_chat, unhealthy_after=1000) as (
        gateway,
        (first, second),
    ):
        await first.stop()
        for _ in range(4):
            assert (await gateway.answer(chat()))[0] == 200
        assert len(second.generations) == 4
        # Where no connection came about, nothing runs that could be aborted.
        assert await gateway.metric('longleaf_gateway_aborts_total{when="before_first_event"}') == 0


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (reset_at_once, 503, "service_unavailable"),
        (end_without_event, 503, "service_unavailable"),
        (be_unavailable, 503, "service_unavailable"),
        (talk_nonsense, 502, "bad_upstream_answer"),
        (hang, 504, "upstream_timeout"),
    ],
)
async def test_error_when_no_other_replica_can_take_over(
    fault: Behaviour, status: int, code: str
) -> None:
    async with gateway_over(fault, first_byte_timeout=0.3) as (gateway, (replica,)):
        got, body, response = await gateway.answer(chat(stream=True))
        assert (got, error_of(body)["code"]) == (status, code)
        assert len(replica.generations) == 1
        assert ("retry-after" in response.headers) == (status == 503)
        assert response.headers.get("x-should-retry") == ("false" if status == 504 else None)


@pytest.mark.parametrize("behaviour", [*BEFORE_FIRST_EVENT, cut_body, answer_captured_chat])
async def test_an_exchange_leaves_no_count_behind(behaviour: Behaviour) -> None:
    """``in_flight`` routes and ``waiting`` sets Retry-After: what they keep, they keep for ever."""
    async with FaultyReplica(behaviour) as faulty:
        client = ReplicaClient(faulty.url, 5.0, None)
        metrics = GatewayMetrics(CollectorRegistry())
        replica = Replica(faulty.url, client, metrics, 3, 2, ReplicaBudget(Rules(1, 1)))
        with contextlib.suppress(ReplicaError):
            deadline = asyncio.get_running_loop().time() + 0.3
            with Exchange(replica, "0" * 32, deadline, 0.3) as exchange:
                assert (replica.in_flight, replica.waiting) == (1, 1)
                await exchange.begin(CHAT, (b'{"stream": true}',), [])
                assert (replica.in_flight, replica.waiting) == (1, 0)
        assert (replica.in_flight, replica.waiting) == (0, 0)
        await replica.close()


async def test_attempts_are_bounded() -> None:
    behaviours = [reset_at_once] * 4
    async with gateway_over(*behaviours, max_attempts=2, unhealthy_after=99) as (gateway, replicas):
        assert (await gateway.answer(chat()))[0] == 503
        assert sum(len(replica.generations) for replica in replicas) == 2


async def reset_after_two(request: Received) -> None:
    await request.start_stream()
    await request.chunk(event("one"))
    await request.chunk(event("two"))
    request.reset()


async def end_after_two(request: Received) -> None:
    await request.start_stream()
    await request.chunk(event("one") + event("two"))
    await request.end_stream()


async def cut_in_third(request: Received) -> None:
    await request.start_stream()
    await request.chunk(event("one") + event("two") + event("three")[:-20])
    request.reset()


async def cut_in_a_character(request: Received) -> None:
    await request.start_stream()
    await request.chunk(event("one") + event("two") + 'data: {"漢'.encode()[:-1])
    await request.end_stream()


async def silent_after_two(request: Received) -> None:
    await request.start_stream()
    await request.chunk(event("one") + event("two"))
    await request.until_gone()


@pytest.mark.parametrize(
    "fault", [reset_after_two, end_after_two, cut_in_third, cut_in_a_character, silent_after_two]
)
async def test_death_after_the_first_event_is_an_error_event(fault: Behaviour) -> None:
    """Whole events, then the error, then the end: no [DONE], and no second replica."""
    async with gateway_over(fault, answer_captured_chat, idle_timeout=0.3) as (
        gateway,
        (first, second),
    ):
        status, body, _ = await gateway.raw(chat(stream=True))
        assert status == 200
        sent = event("one") + event("two")
        assert body.startswith(sent)
        last = body[len(sent) :]
        assert last.startswith(b"data: ")
        assert last.endswith(b"\n\n")
        assert error_of(json.loads(last[6:]))["code"] == "stream_interrupted"
        assert (len(first.generations), second.generations) == (1, [])
        assert await first.aborted.get() == first.generations[0].json["rid"]


async def test_captured_stream_without_done_counts_as_died() -> None:
    async def behaviour(request: Received) -> None:
        await request.replay("client_abort_stream")

    async with gateway_over(behaviour) as (gateway, _):
        _, body, _ = await gateway.raw(chat(stream=True))
        sent, _, last = body.rpartition(b"data: ")
        assert captured_body("client_abort_stream").startswith(sent)
        assert error_of(json.loads(last))["code"] == "stream_interrupted"


async def test_replica_that_stays_open_after_done_ends_the_answer() -> None:
    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event() + DONE)
        await request.until_gone()

    async with gateway_over(behaviour, idle_timeout=0.3) as (gateway, _):
        assert (await gateway.raw(chat(stream=True)))[1] == event() + DONE


async def test_slow_replica_is_not_a_dead_one() -> None:
    """Every byte comes within the idle limit, the whole takes much longer than it."""

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        for _ in range(8):
            await request.chunk(event())
            await asyncio.sleep(0.1)
        await request.chunk(DONE)
        await request.end_stream()

    async with gateway_over(behaviour, idle_timeout=0.4) as (gateway, _):
        assert (await gateway.raw(chat(stream=True)))[1] == event() * 8 + DONE


async def test_hung_replica_hurts_nobody_else() -> None:
    async with gateway_over(hang, answer_captured_chat) as (gateway, (hung, _)):
        waiting = [asyncio.create_task(gateway.answer(chat())) for _ in range(8)]
        for _ in range(4):
            await hung.arrived.get()
        done, pending = await asyncio.wait(waiting, timeout=10, return_when="FIRST_COMPLETED")
        while len(done) < 4:
            more, pending = await asyncio.wait(pending, return_when="FIRST_COMPLETED")
            done |= more
        assert [task.result()[0] for task in done] == [200] * 4
        for task in pending:
            task.cancel()
        await asyncio.wait(pending)


@pytest.mark.parametrize("name", ["burst_06_stream", "burst_07"])
async def test_full_queue_is_429_with_retry_after(name: str) -> None:
    async def full(request: Received) -> None:
        await request.replay(name)

    async with gateway_over(full, full) as (gateway, replicas):
        status, body, response = await gateway.answer(chat(stream=name.endswith("stream")))
        error = error_of(body)
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
        assert response.headers["retry-after"] == "10"  # nothing has ended yet: rate unknown
        assert [len(replica.generations) for replica in replicas] == [1, 1]


async def test_full_queue_of_one_replica_is_taken_over_by_another() -> None:
    async def full(request: Received) -> None:
        await request.replay("burst_06_stream")

    async with gateway_over(full, answer_captured_chat) as (gateway, _):
        status, body, _ = await gateway.raw(chat(stream=True))
        assert (status, body) == (200, captured_body("chat_stream"))


async def test_saturated_wins_over_gone() -> None:
    async def full(request: Received) -> None:
        await request.replay("burst_07")

    for behaviours in ((full, reset_at_once), (reset_at_once, full)):
        async with gateway_over(*behaviours) as (gateway, _):
            assert (await gateway.answer(chat()))[0] == 429


async def test_retry_after_follows_the_rate_of_what_the_replica_finishes() -> None:
    """Refused requests end faster than any other, and say nothing about it."""

    async def behaviour(request: Received) -> None:
        if request.json.get("user") == "served":
            await asyncio.sleep(1.2)
            await request.replay("chat")
        else:
            await request.replay("burst_07")

    async with gateway_over(behaviour) as (gateway, _):
        assert (await gateway.raw(chat(user="served")))[0] == 200
        for _ in range(5):
            status, _, response = await gateway.answer(chat())
            assert status == 429
            assert int(response.headers["retry-after"]) >= 2  # one at a time, each over 1.2 s


@pytest.mark.parametrize(
    ("name", "param", "message"),
    [
        (
            "err_bad_temperature",
            "temperature",
            "temperature must be a non-negative finite number, got -1.0.",
        ),
        ("err_missing_messages", "messages", "messages: Field required"),
    ],
)
async def test_flat_errors_are_enveloped(name: str, param: str, message: str) -> None:
    async def behaviour(request: Received) -> None:
        await request.replay(name)

    async with gateway_over(behaviour, behaviour) as (gateway, replicas):
        status, body, _ = await gateway.answer(chat(temperature=1))
        error = error_of(body)
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert error["message"] == message
        assert sum(len(replica.generations) for replica in replicas) == 1  # no retry


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_error_is_500_and_not_retried(stream: bool) -> None:
    async def behaviour(request: Received) -> None:
        if stream:
            await request.start_stream()
            await request.chunk(b'data: {"error": {"message": "boom", "code": 500}}\n\n' + DONE)
            await request.end_stream()
        else:
            await request.answer(500, b'{"object": "error", "message": "boom", "code": 500}')

    async with gateway_over(behaviour, behaviour) as (gateway, replicas):
        status, body, _ = await gateway.answer(chat(stream=stream))
        assert (status, error_of(body)["message"]) == (500, "boom")
        assert sum(len(replica.generations) for replica in replicas) == 1


async def test_no_ready_replica_is_503_with_retry_after() -> None:
    async with FaultyReplica() as replica:
        replica.health_status = 503
        async with running_gateway(replica.url) as gateway:
            status, body, response = await gateway.answer(chat())
            assert (status, error_of(body)["code"]) == (503, "service_unavailable")
            assert int(response.headers["retry-after"]) >= 1
            async with gateway.http.get(gateway.url + "/v1/models") as response:
                assert response.status == 503
        assert replica.generations == []


async def test_small_answers_have_a_limit_of_bytes_and_of_depth() -> None:
    async def behaviour(request: Received) -> None:
        if request.path == "/deep":
            await request.answer(200, b"[" * 200_000)
        else:
            await request.start_stream()
            while not request.writer.is_closing():
                await request.chunk(b"x" * 65_536)

    async with FaultyReplica(behaviour) as replica:
        client = ReplicaClient(replica.url, 5.0, None)
        with pytest.raises(ReplicaError, match="not JSON") as caught:
            await client.fetch_json("GET", "/deep", LIMIT)
        assert caught.value.kind == "bad_answer"
        with pytest.raises(ReplicaError, match="over 1000000 bytes"):
            await client.fetch("GET", "/endless", LIMIT, most=1_000_000)
        assert client.connections == 0
        await client.close()
