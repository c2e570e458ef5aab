"""Limits of API keys, and the file that holds them."""

import asyncio
import json
import math
from hashlib import sha256
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from longleaf.gateway.admission.limits import KeyLimitError, KeyLimits
from longleaf.gateway.auth import ApiKey, KeyRing, follow_key_file
from longleaf.metrics import GatewayMetrics
from tests.gateway.faulty_replica import (
    DONE,
    Behaviour,
    Received,
    answer_captured_chat,
    captured_body,
    event,
)
from tests.gateway.running import CHAT, chat, eventually, gateway_over
from tests.gateway.test_budget import Clock
from tests.gateway.test_requests import error_of

pytestmark = pytest.mark.anyio


def test_requests_a_minute() -> None:
    clock = Clock()
    limits, key = KeyLimits(clock), ApiKey("k", requests_per_minute=30)
    for _ in range(30):
        limits.charge(key, 0)
    with pytest.raises(KeyLimitError) as caught:
        limits.charge(key, 0)
    assert (caught.value.what, caught.value.retry_after) == ("requests", 2.0)
    limits.charge(ApiKey("other", requests_per_minute=30), 0)
    clock.now += 2.0
    limits.charge(key, 0)
    with pytest.raises(KeyLimitError):
        limits.charge(key, 0)


def test_tokens_a_minute_are_settled_by_usage() -> None:
    clock = Clock()
    limits, key = KeyLimits(clock), ApiKey("k", tokens_per_minute=6_000)
    charge = limits.charge(key, 5_000)
    with pytest.raises(KeyLimitError) as caught:
        limits.charge(key, 1_500)
    assert caught.value.what == "tokens"
    assert caught.value.retry_after == pytest.approx(5.0)
    charge.settle(700)
    limits.charge(key, 5_300)
    with pytest.raises(KeyLimitError):
        limits.charge(key, 1)


def test_a_request_above_a_minutes_worth_needs_a_full_bucket_and_leaves_a_debt() -> None:
    clock = Clock()
    limits, key = KeyLimits(clock), ApiKey("k", tokens_per_minute=600)
    limits.charge(key, 1_800)
    with pytest.raises(KeyLimitError) as caught:
        limits.charge(key, 60)
    assert caught.value.retry_after == pytest.approx(126.0)
    clock.now += 126.0
    limits.charge(key, 60)


@pytest.mark.parametrize(
    ("limit", "wait"),
    [(6_000, 10.0), (600, 60.0), (60, 200.0)],
)
def test_a_changed_limit_gives_nothing_back(limit: int, wait: float) -> None:
    """What runs is settled with the changed bucket."""
    clock = Clock()
    limits = KeyLimits(clock)
    charge = limits.charge(ApiKey("k", tokens_per_minute=1_200), 1_000)
    limits.peek(ApiKey("k", tokens_per_minute=limit), 0)
    charge.settle(1_200)
    with pytest.raises(KeyLimitError) as caught:
        limits.charge(ApiKey("k", tokens_per_minute=limit), min(limit, 1_000))
    assert caught.value.retry_after == pytest.approx(wait)


def test_refused_takes_nothing() -> None:
    limits = KeyLimits(Clock())
    key = ApiKey("k", requests_per_minute=2, tokens_per_minute=100)
    limits.charge(key, 90)
    for _ in range(5):
        with pytest.raises(KeyLimitError):
            limits.charge(key, 50)
    limits.charge(key, 10)  # the second request


def test_options_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one requests_per_minute=60 priority=-3\ntwo tokens_per_minute=9\nthree\n")
    ring = KeyRing.load(path)
    one, two, three = (ring.find(f"Bearer {name}") for name in ("one", "two", "three"))
    assert one is not None
    assert two is not None
    assert three is not None
    assert (one.requests_per_minute, one.tokens_per_minute, one.priority) == (60, None, -3)
    assert (two.requests_per_minute, two.tokens_per_minute, two.priority) == (None, 9, 0)
    assert (three.requests_per_minute, three.tokens_per_minute) == (None, None)
    assert len({one.id, two.id, three.id}) == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("key rpm=5\n", "line 1: a key holds no blanks"),
        ("key requests_per_minute=many\n", "each with a whole number"),
        ("key requests_per_minute=0\n", "requests_per_minute must be at least 1"),
        ("key tokens_per_minute=-1\n", "tokens_per_minute must be at least 1"),
        ("good\nclé\n", "line 2: a key must be ASCII"),
        ("one\n# x\ntwo\none priority=1\n", "line 4: the key of line 1 again"),
        (f"sha256:{sha256(b'one').hexdigest()}\none\n", "line 2: the key of line 1 again"),
    ],
)
def test_wrong_options(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=why):
        KeyRing.load(path)


async def test_the_key_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\n")
    ring = KeyRing.load(path)
    registry = CollectorRegistry()
    following = asyncio.create_task(follow_key_file(ring, path, 0.01, GatewayMetrics(registry)))

    async def until(value: float, key: str, known: bool) -> None:
        async with asyncio.timeout(10):
            while (  # noqa: ASYNC110 - another task reads the file
                registry.get_sample_value("longleaf_gateway_key_file_up") != value
                or (ring.find(f"Bearer {key}") is not None) is not known
            ):
                await asyncio.sleep(0.005)

    await until(1, "first", True)
    # As a mounted Secret is changed: another file takes the name.
    (tmp_path / "next").write_text("second requests_per_minute=5\n")
    (tmp_path / "next").rename(path)
    await until(1, "second", True)
    assert ring.find("Bearer first") is None
    path.write_text("sha256:12\n")
    await until(0, "second", True)
    path.unlink()
    path.write_text("third\n")
    await until(1, "third", True)
    following.cancel()


async def test_limits_over_http(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("slow requests_per_minute=1\nfast\n")
    async with gateway_over(answer_captured_chat, api_key_file=path) as (gateway, (replica,)):
        slow = {"authorization": "Bearer slow"}
        assert (await gateway.answer(chat(), headers=slow))[0] == 200
        status, body, response = await gateway.answer(chat(), headers=slow)
        error = error_of(body)
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
        assert "1 requests a minute" in error["message"]
        assert 58 <= int(response.headers["retry-after"]) <= 60
        assert (await gateway.answer(chat(), headers={"authorization": "Bearer fast"}))[0] == 200
        assert len(replica.generations) == 2
        refused = 'admission_decisions_total{decision="refused",reason="key_requests"}'
        assert await gateway.metric("longleaf_gateway_" + refused) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_settled_by_the_usage_of_the_answer(tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "keys"
    path.write_text("key tokens_per_minute=1000\n")
    headers = {"authorization": "Bearer key"}
    async with gateway_over(answer_captured_chat, api_key_file=path) as (gateway, (replica,)):
        request = chat(stream=stream, max_tokens=900)
        usage = captured_body("chat_stream" if stream else "chat")
        assert b'"completion_tokens"' in usage
        for _ in range(3):  # each is charged 914 tokens and took far fewer
            assert (await gateway.raw(request, CHAT, headers=headers))[0] == 200
        assert len(replica.tokenized) == 3  # a limit of tokens wants exact counts
        replica.prompt_tokens = 2_000
        assert (await gateway.raw(request, CHAT, headers=headers))[0] == 429


def usage_of(completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": 14,
        "total_tokens": 14 + completion,
        "completion_tokens": completion,
    }


def token_stream(completion: int) -> Behaviour:
    """A stream of so many tokens, one a chunk, with usage where it is asked for, as SGLang's is."""

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        for _ in range(completion):
            await request.chunk(event("x"))
        if (request.json.get("stream_options") or {}).get("include_usage"):
            await request.chunk(event("", choices=[], usage=usage_of(completion)) + DONE)
        else:
            await request.chunk(DONE)
        await request.end_stream()

    return behaviour


@pytest.mark.parametrize("limit", [1_000, None])
async def test_a_plain_stream_is_charged_and_shows_no_usage(
    tmp_path: Path, limit: int | None
) -> None:
    """Also where the client names no ``max_tokens`` and does not ask for usage."""
    path = tmp_path / "keys"
    path.write_text("key" if limit is None else f"key tokens_per_minute={limit}")
    headers = {"authorization": "Bearer key"}
    settings = {"api_key_file": path, "assumed_completion_tokens": 300}
    async with gateway_over(token_stream(236), **settings) as (gateway, (replica,)):
        for _ in range(3):  # 250 tokens each, of which 314 must be free at first
            status, answer, _ = await gateway.raw(chat(stream=True), headers=headers)
            assert (status, answer) == (200, event("x") * 236 + DONE)
        received = replica.generations[0].json
        assert received.get("stream_options") == (limit and {"include_usage": True})
        body = chat(stream=True, max_tokens=900)
        status, _, response = await gateway.raw(body, headers=headers)
        assert status == (200 if limit is None else 429)
        if limit is not None:  # 250 of 1,000 are left: the 664 that miss come in 39.8 s
            assert 30 <= int(response.headers["retry-after"]) <= 40


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"include_usage": True}, {"include_usage": True}),
        ({"include_usage": False, "x": [1.5]}, {"include_usage": True, "x": [1.5]}),
        ({"x": "y" * 5000}, {"include_usage": True}),
    ],
)
async def test_who_asks_for_usage_gets_it(
    tmp_path: Path, given: dict[str, object], sent: dict[str, object]
) -> None:
    path = tmp_path / "keys"
    path.write_text("key tokens_per_minute=100000")
    headers = {"authorization": "Bearer key"}
    async with gateway_over(token_stream(2), api_key_file=path) as (gateway, (replica,)):
        body = chat(stream=True, stream_options=given)
        _, answer, _ = await gateway.raw(body, headers=headers)
        assert (b'"usage"' in answer) is (given.get("include_usage") is True)
        assert answer.endswith(DONE)
        assert replica.generations[0].json["stream_options"] == sent


@pytest.mark.parametrize("named", [b"", b"event: message\n", b": hint\nevent: message\n"])
@pytest.mark.parametrize("extra", [{}, {"sglext": {"spec_verify_ct": 3}}])
async def test_usage_is_cut_and_nothing_else(
    tmp_path: Path, named: bytes, extra: dict[str, object]
) -> None:
    path = tmp_path / "keys"
    path.write_text("key tokens_per_minute=100000")
    told = named + event("", choices=[], usage=usage_of(3), **extra)

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("x") + told + DONE)
        await request.end_stream()

    async with gateway_over(behaviour, api_key_file=path) as (gateway, _):
        headers = {"authorization": "Bearer key"}
        _, answer, _ = await gateway.raw(chat(stream=True), headers=headers)
        assert answer.startswith(event("x"))
        assert answer.endswith(DONE)
        rest = answer.removeprefix(event("x")).removesuffix(DONE)
        assert b"usage" not in rest
        if not extra:
            assert rest == b""
        else:
            before, _, text = rest.partition(b"data: ")
            assert before == named
            chunk = json.loads(text)
            assert (chunk["id"], chunk["sglext"]) == ("c", extra["sglext"])
            assert rest.endswith(b"\n\n")


async def test_a_stream_that_its_client_leaves_is_charged_what_has_passed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("key tokens_per_minute=1000")
    headers = {"authorization": "Bearer key"}

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("x") * 486)
        await request.until_gone()

    async with gateway_over(behaviour, api_key_file=path) as (gateway, (replica,)):
        body = chat(stream=True, max_tokens=900)
        async with gateway.post(body, headers=headers) as response:
            await response.content.readexactly(len(event("x")) * 486)
        await replica.aborted.get()
        replica.behaviour = token_stream(1)
        # 914 of 1,000 were charged, 500 were taken.
        assert (await gateway.raw(chat(stream=True, max_tokens=700), headers=headers))[0] == 429
        assert (await gateway.raw(chat(stream=True, max_tokens=470), headers=headers))[0] == 200


@pytest.mark.parametrize("client_leaves", [True, False])
async def test_a_prompt_is_charged_only_where_its_client_left(
    tmp_path: Path, client_leaves: bool
) -> None:
    path = tmp_path / "keys"
    path.write_text("key tokens_per_minute=1000")
    headers = {"authorization": "Bearer key"}

    async def behaviour(request: Received) -> None:
        if client_leaves:
            await request.until_gone()
        else:
            request.reset()

    async with gateway_over(behaviour, api_key_file=path, max_attempts=1) as (gateway, (replica,)):
        replica.prompt_tokens = 800
        asked = asyncio.create_task(gateway.raw(chat(max_tokens=100), headers=headers))
        await replica.arrived.get()
        if client_leaves:
            asked.cancel()
            await replica.aborted.get()
        else:
            assert (await asked)[0] == 503
        await eventually(lambda: gateway.server.drain.running == 0)
        replica.behaviour = answer_captured_chat
        replica.prompt_tokens = 14
        expected = 429 if client_leaves else 200
        assert (await gateway.raw(chat(max_tokens=400), headers=headers))[0] == expected


def tokens_left(status: int, response: aiohttp.ClientResponse, limit: int) -> float:
    """Of a bucket, as its refusal of a whole minute's worth tells."""
    assert status == 429
    return limit - int(response.headers["retry-after"]) * limit / 60


@pytest.mark.parametrize(
    ("wishes", "taken"),
    [({}, 2_014), ({"max_tokens": 500}, 514)],
)
async def test_a_stream_without_usage_is_charged_all_that_has_passed(
    tmp_path: Path, wishes: dict[str, int], taken: int
) -> None:
    """More than was assumed, too; where the client set a limit, no estimate goes beyond it."""
    path = tmp_path / "keys"
    path.write_text("key tokens_per_minute=3000")
    headers = {"authorization": "Bearer key"}

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("x") * 2_000)
        await request.chunk(DONE)
        await request.end_stream()

    settings = {"api_key_file": path, "assumed_completion_tokens": 300}
    async with gateway_over(behaviour, **settings) as (gateway, _):
        assert (await gateway.raw(chat(stream=True, **wishes), headers=headers))[0] == 200
        status, _, response = await gateway.raw(chat(max_tokens=3000), headers=headers)
        assert tokens_left(status, response, 3000) == pytest.approx(3000 - taken, abs=200)


@pytest.mark.parametrize(("steps", "taken"), [(0, 2_014), (100, 514)])
async def test_a_whole_answer_that_its_client_leaves_is_charged_what_was_generated(
    tmp_path: Path, steps: int, taken: int
) -> None:
    """By the step time that the replica told; all that was asked for, where it told none."""
    path = tmp_path / "keys"
    path.write_text("key tokens_per_minute=3000")
    headers = {"authorization": "Bearer key"}
    left = asyncio.Event()

    async def behaviour(request: Received) -> None:
        await request.until_gone()
        left.set()

    async with gateway_over(behaviour, api_key_file=path, loads_interval=0.02) as (
        gateway,
        (replica,),
    ):
        assert replica.load is not None
        known = f'longleaf_gateway_step_model_coefficient{{replica="{replica.url}",term="a"}}'
        done = 0
        while steps and math.isnan(await gateway.metric(known)):
            done += steps  # of 2 ms that commit 2 tokens: a millisecond for each
            replica.load["decode_moments"] = [
                done,
                done,
                done * 2_000,
                done,
                done * 2_000,
                2 * done,
            ]
            await asyncio.sleep(0.02)
        asked = asyncio.create_task(gateway.raw(chat(max_tokens=2000), headers=headers))
        await replica.arrived.get()
        await asyncio.sleep(0.5)
        asked.cancel()
        await left.wait()
        await eventually(lambda: gateway.server.drain.running == 0)
        status, _, response = await gateway.raw(chat(max_tokens=3000), headers=headers)
        assert tokens_left(status, response, 3000) == pytest.approx(3000 - taken, abs=250)


@pytest.mark.parametrize(
    ("given", "sent"),
    [({"priority": 100}, 2), ({"priority": -7}, -7), ({"priority": "100"}, 0), ({}, 2)],
)
async def test_the_engine_gets_the_priority_that_the_key_may_have(
    tmp_path: Path, given: dict[str, object], sent: int
) -> None:
    path = tmp_path / "keys"
    path.write_text("high priority=2\nplain\n")
    async with gateway_over(answer_captured_chat, api_key_file=path) as (gateway, (replica,)):
        for key in ("high", "plain"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await gateway.raw(chat(**given), headers=headers))[0] == 200
        high, plain = (received.json.get("priority") for received in replica.generations)
        assert high == sent
        assert plain == (min(sent, 0) if given else None)
