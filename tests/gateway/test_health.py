"""Health of replicas and of the gateway itself: hysteresis, recovery, draining."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from longleaf.gateway.replicas.breaker import CircuitBreaker
from tests.gateway.faulty_replica import DONE, FaultyReplica, Received, answer_captured_chat, event
from tests.gateway.running import LIMIT, chat, eventually, gateway_over, running_gateway
from tests.gateway.test_requests import error_of

pytestmark = pytest.mark.anyio


async def test_live_without_replicas_ready_only_with_one() -> None:
    async with FaultyReplica() as replica:
        replica.health_status = 503
        async with running_gateway(replica.url) as gateway:
            async with gateway.http.get(gateway.url + "/livez") as response:
                assert response.status == 200
            async with gateway.http.get(gateway.url + "/readyz") as response:
                assert response.status == 503
                assert error_of(await response.json())["code"] == "service_unavailable"
            replica.health_status = 200
            await gateway.until_ready(1)


async def test_one_success_is_enough_the_first_time() -> None:
    async with gateway_over(answer_captured_chat, healthy_after=1000) as (gateway, _):
        assert await gateway.ready() == 1


async def test_a_replica_that_is_away_is_asked_more_often() -> None:
    async with FaultyReplica() as replica:
        replica.health_status = 503
        async with running_gateway(replica.url, health_interval=600) as gateway:
            await checks(replica, 3)
            replica.health_status = 200
            await gateway.until_ready(1)


async def checks(replica: FaultyReplica, count: int) -> None:
    """Return after that many further health checks have begun, so one less has ended."""
    seen = replica.health_checks
    await eventually(lambda: replica.health_checks >= seen + count)


async def test_one_failed_check_ejects_nobody() -> None:
    async with gateway_over(answer_captured_chat, unhealthy_after=3) as (gateway, (replica,)):
        for _ in range(3):
            replica.health_status = 503
            await checks(replica, 2)
            replica.health_status = 200
            assert await gateway.ready() == 1
            await checks(replica, 3)
        replica.health_status = 503
        await gateway.until_ready(0)
        gauge = f'longleaf_gateway_replica_ready{{replica="{replica.url}"}}'
        assert await gateway.metric(gauge) == 0


async def test_replica_comes_back_only_after_several_successes() -> None:
    async with FaultyReplica() as replica:
        settings: dict[str, Any] = {
            "unhealthy_after": 1,
            "healthy_after": 4,
            "recovery_interval": 0.05,
        }
        async with running_gateway(replica.url, ready=1, **settings) as gateway:
            replica.health_status = 503
            await gateway.until_ready(0)
            before = replica.health_checks
            replica.health_status = 200
            await gateway.until_ready(1)
            assert replica.health_checks - before >= 4


async def test_hung_replica_is_ejected_by_the_timeout_of_its_check() -> None:
    async with FaultyReplica() as replica:
        settings: dict[str, Any] = {"unhealthy_after": 1, "health_timeout": 1.1}
        async with running_gateway(replica.url, ready=1, **settings) as gateway:
            replica.health_hangs = True
            await gateway.until_ready(0)


async def test_failed_requests_eject_a_replica_without_waiting_for_its_check() -> None:
    async def reset(request: Received) -> None:
        request.reset()

    async with gateway_over(reset, unhealthy_after=2, health_interval=600) as (gateway, _):
        assert (await gateway.answer(chat()))[0] == 503
        assert await gateway.ready() == 1
        assert (await gateway.answer(chat()))[0] == 503
        assert await gateway.ready() == 0


async def test_silence_in_mid_stream_ejects_no_replica() -> None:
    """It may be one stuck answer of many: whether the replica lives, its health check says."""

    async def fall_silent(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event())
        await request.until_gone()

    settings: dict[str, Any] = {"idle_timeout": 0.1, "unhealthy_after": 1, "health_interval": 600}
    async with gateway_over(fall_silent, **settings) as (gateway, _):
        assert b"stream_interrupted" in (await gateway.raw(chat(stream=True)))[1]
        assert await gateway.ready() == 1


async def test_answered_requests_forgive_failures() -> None:
    async def behaviour(request: Received) -> None:
        if request.json.get("user") == "reset":
            request.reset()
        else:
            await request.replay("chat")

    async with gateway_over(behaviour, unhealthy_after=2, health_interval=600) as (gateway, _):
        for _ in range(4):
            assert (await gateway.answer(chat(user="reset")))[0] == 503
            assert (await gateway.answer(chat()))[0] == 200
        assert await gateway.ready() == 1


async def test_replica_that_returns_smaller_is_known_as_smaller() -> None:
    async with gateway_over(answer_captured_chat, unhealthy_after=1) as (gateway, (replica,)):
        assert (await gateway.answer(chat(max_tokens=3000)))[0] == 200
        await replica.stop()
        await gateway.until_ready(0)
        replica.server_info = {"max_total_num_tokens": 1000, "max_req_input_len": 994}
        await replica.start()
        await gateway.until_ready(1)
        status, body, _ = await gateway.answer(chat(max_tokens=3000))
        assert (status, error_of(body)["code"]) == (400, "context_length_exceeded")


async def test_limits_of_a_ready_replica_are_read_again() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        assert (await gateway.answer(chat(max_tokens=3000)))[0] == 200
        replica.server_info = {"max_total_num_tokens": 1000, "max_req_input_len": 994}
        await checks(replica, 3)
        assert await gateway.ready() == 1
        assert (await gateway.answer(chat(max_tokens=3000)))[0] == 400


async def test_another_model_on_a_ready_replica_is_known_by_its_next_check() -> None:
    """Engines do not check the name: what was meant for one model must not reach another."""
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        assert (await gateway.answer(chat()))[0] == 200
        replica.models["data"][0]["id"] = "another"
        await checks(replica, 3)
        assert await gateway.ready() == 1
        status, body, _ = await gateway.answer(chat())
        assert (status, error_of(body)["code"]) == (404, "model_not_found")
        assert (await gateway.answer(chat(model="another")))[0] == 200
        assert len(replica.generations) == 2


async def test_replica_without_limits_is_not_ready() -> None:
    async with FaultyReplica() as replica:
        replica.models = {"object": "list", "data": []}
        async with running_gateway(replica.url) as gateway:
            await checks(replica, 3)
            assert await gateway.ready() == 0
            replica.models = {"object": "list", "data": [{"id": "tiny"}]}
            await gateway.until_ready(1)


async def test_draining_refuses_new_work_and_lets_answers_finish() -> None:
    release = asyncio.Event()

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("one"))
        await release.wait()
        await request.chunk(event("two") + DONE)
        await request.end_stream()

    async with gateway_over(behaviour) as (gateway, (replica,)):
        async with gateway.post(chat(stream=True)) as running:
            await running.content.readexactly(len(event("one")))
            drain = gateway.server.drain
            drain.begin()
            finish = asyncio.create_task(drain.finish(LIMIT))
            status, body, response = await gateway.answer(chat())
            assert (status, error_of(body)["code"]) == (503, "service_unavailable")
            assert "retry-after" in response.headers
            async with gateway.http.get(gateway.url + "/readyz") as response:
                assert response.status == 503
            async with gateway.http.get(gateway.url + "/livez") as response:
                assert response.status == 200
            assert not finish.done()
            release.set()
            assert await running.read() == event("two") + DONE
            assert await finish
        assert len(replica.generations) == 1


async def test_drain_limit_ends_answers_with_an_error_and_stops_the_replica() -> None:
    async def behaviour(request: Received) -> None:
        if request.json.get("stream"):
            await request.start_stream()
            await request.chunk(event("one"))
        await request.until_gone()

    async with gateway_over(behaviour) as (gateway, (replica,)):
        waiting = asyncio.create_task(gateway.answer(chat()))
        whole = await replica.arrived.get()
        async with gateway.post(chat(stream=True)) as running:
            streamed = await replica.arrived.get()
            await running.content.readexactly(len(event("one")))
            gateway.server.drain.begin()
            assert not await gateway.server.drain.finish(0.05)
            last = await running.read()
        assert error_of(json.loads(last.removeprefix(b"data: ")))["code"] == "service_unavailable"
        status, body, _ = await waiting
        assert (status, error_of(body)["code"]) == (503, "service_unavailable")
        aborted = {await replica.aborted.get(), await replica.aborted.get()}
        assert aborted == {whole.json["rid"], streamed.json["rid"]}


async def test_metrics_live_on_their_own_port() -> None:
    async with gateway_over(lambda request: request.replay("chat")) as (gateway, (replica,)):
        assert (await gateway.answer(chat()))[0] == 200
        assert (await gateway.answer(chat(model="other")))[0] == 404
        ok = 'longleaf_gateway_requests_total{code="200",reason="ok",route="chat_completions"}'
        assert await gateway.metric(ok) == 1
        unknown = ok.replace("200", "404").replace("ok", "model_not_found", 1)
        assert await gateway.metric(unknown) == 1
        for family in ("first_byte_seconds", "request_seconds"):
            sample = f'longleaf_gateway_{family}_count{{route="chat_completions"}}'
            assert await gateway.metric(sample) == 2
        gauge = f'longleaf_gateway_replica_ready{{replica="{replica.url}"}}'
        assert await gateway.metric(gauge) == 1
        async with gateway.http.get(gateway.url + "/metrics") as response:
            assert response.status == 404
        text = await gateway.metrics()
        assert "process_resident_memory_bytes" in text
        url = f"http://127.0.0.1:{gateway.server.metrics_port}/v1/models"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            assert response.status == 404


def state_of(replica: FaultyReplica, state: str) -> str:
    return f'longleaf_gateway_replica_state{{replica="{replica.url}",state="{state}"}}'


async def test_a_replica_that_is_healthy_and_fails_every_request_gets_none() -> None:
    broken = True

    async def behaviour(request: Received) -> None:
        if broken:
            request.reset()
        else:
            await request.replay("chat")

    settings: dict[str, Any] = {"unhealthy_after": 999, "breaker_failures": 3}
    async with gateway_over(behaviour, breaker_pause=0.2, **settings) as (gateway, (replica,)):
        for _ in range(3):
            assert (await gateway.answer(chat()))[0] == 503
        assert await gateway.metric(state_of(replica, "circuit_open")) == 1
        assert (await gateway.answer(chat()))[0] == 503
        assert len(replica.generations) == 3
        await asyncio.sleep(0.25)
        assert (await gateway.answer(chat()))[0] == 503  # the trial fails: twice the pause
        assert len(replica.generations) == 4
        broken = False
        await asyncio.sleep(0.25)
        assert (await gateway.answer(chat()))[0] == 503
        await gateway.until_ready(1)
        assert (await gateway.answer(chat()))[0] == 200
        assert await gateway.metric(state_of(replica, "ready")) == 1


def test_breaker_states() -> None:
    now = 0.0
    breaker = CircuitBreaker(2, 10.0, lambda: now)
    one, other = object(), object()

    def seen() -> tuple[str, bool]:
        return breaker.state, breaker.allows

    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert seen() == ("closed", True)
    breaker.failed()
    assert seen() == ("open", False)
    now = 9.0
    breaker.failed()  # one that was on its way: no longer a pause for it
    now = 10.0
    assert seen() == ("half_open", True)
    breaker.begin(one)
    assert not seen()[1]
    breaker.end(one)  # its client left
    assert seen()[1]
    breaker.begin(other)
    breaker.failed()
    now = 29.9
    assert seen()[0] == "open"
    now = 30.0
    for pause in (40.0, 80.0, 160.0, 160.0):
        assert seen()[0] == "half_open"
        breaker.failed()
        now += pause
    breaker.begin(one)
    breaker.succeeded()
    assert seen() == ("closed", True)


async def test_one_replica_takes_only_so_many_connections() -> None:
    release = asyncio.Event()

    async def behaviour(request: Received) -> None:
        await release.wait()
        await request.replay("chat")

    async with gateway_over(behaviour, max_connections=2) as (gateway, (replica,)):
        asked = [asyncio.create_task(gateway.answer(chat())) for _ in range(4)]
        await eventually(lambda: len(replica.generations) == 2)
        await asyncio.sleep(0.2)
        assert len(replica.generations) == 2
        release.set()
        assert [(await one)[0] for one in asked] == [200] * 4


async def test_requests_that_waited_go_out_one_by_one_where_only_one_may() -> None:
    running = most = 0

    async def behaviour(request: Received) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        await request.replay("chat")

    async with gateway_over(behaviour, max_connections=1) as (gateway, _):
        asked = [asyncio.create_task(gateway.answer(chat())) for _ in range(9)]
        assert [(await one)[0] for one in asked] == [200] * 9
    assert most == 1


async def test_requests_leave_a_hung_replica() -> None:
    async def hang(request: Received) -> None:
        await request.until_gone()

    settings: dict[str, Any] = {"hang_timeout": 0.3, "health_timeout": 1.1}
    async with gateway_over(hang, answer_captured_chat, **settings) as (gateway, (hung, _)):
        hung.health_hangs = True
        status, _, _ = await gateway.raw(chat(stream=True))
        assert status == 200
        assert await hung.aborted.get() == hung.generations[0].json["rid"]
        kind = f'longleaf_gateway_upstream_errors_total{{kind="hung",replica="{hung.url}"}}'
        assert await gateway.metric(kind) == 1


async def test_a_busy_replica_is_no_hung_one() -> None:
    """It answers no health check in time, but others get their tokens."""

    async def stream(request: Received) -> None:
        await request.start_stream()
        for _ in range(60):
            await request.chunk(event())
            await asyncio.sleep(0.05)
        await request.chunk(DONE)
        await request.end_stream()

    settings: dict[str, Any] = {"unhealthy_after": 1, "health_timeout": 1.1}
    async with gateway_over(stream, **settings) as (gateway, (replica,)):
        answer = asyncio.create_task(gateway.raw(chat(stream=True)))
        await replica.arrived.get()
        replica.health_hangs = True
        await checks(replica, 2)
        assert await gateway.ready() == 1
        replica.health_hangs = False
        assert (await answer)[1].endswith(DONE)


async def test_the_first_event_has_one_deadline_for_all_attempts() -> None:
    async def hang(request: Received) -> None:
        await request.until_gone()

    async with gateway_over(hang, hang, hang, first_byte_timeout=0.3) as (gateway, replicas):
        status, body, _ = await gateway.answer(chat())
        assert (status, error_of(body)["code"]) == (504, "upstream_timeout")
        assert sum(len(replica.generations) for replica in replicas) == 1
