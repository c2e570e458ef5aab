"""Requests that can never fit are refused before they run, and counted only where it matters."""

import pytest

from longleaf.gateway.prompts.inspection import token_bound
from longleaf.gateway.replicas.facts import ReplicaLimits, parse_facts
from tests.gateway.faulty_replica import (
    DONE,
    FaultyReplica,
    Received,
    answer_captured_chat,
    captured,
    event,
)
from tests.gateway.running import Gateway, chat, gateway_over, running_gateway
from tests.gateway.test_requests import error_of

pytestmark = pytest.mark.anyio

LONG = [{"role": "user", "content": "word " * 2000}]
COUNTED = 'longleaf_gateway_token_counts_total{outcome="counted"}'
BOUNDED = 'longleaf_gateway_token_counts_total{outcome="bounded"}'
FAILED = 'longleaf_gateway_token_counts_total{outcome="failed"}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "counts"),
    [
        (4090, None, ("4090", "4089")),  # the pool takes prompts of up to 4089
        (5000, None, ("5000", "4096")),
        (4000, 97, ("4097", "4096", "4000", "97")),
        (14, 4083, ("4097", "4096")),
        (9000, None, ("9000", "8192")),
        (14, 8179, ("8193", "8192")),
    ],
)
async def test_never_fits_is_400_context_length_exceeded(
    prompt_tokens: int, max_tokens: int | None, counts: tuple[str, ...], stream: bool
) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        replica.prompt_tokens = prompt_tokens
        request = chat(messages=LONG, max_tokens=max_tokens, stream=stream)
        status, body, response = await gateway.answer(request)
        error = error_of(body)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        param = "messages" if prompt_tokens > 4089 else "max_tokens"  # what must be less
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert response.headers["x-should-retry"] == "false"
        assert all(count in error["message"] for count in counts)
        assert replica.generations == []


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"), [(4089, None), (4000, 96), (4089, 7), (1, 4095)]
)
async def test_longest_that_fits_passes(prompt_tokens: int, max_tokens: int | None) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        replica.prompt_tokens = prompt_tokens
        status, _, _ = await gateway.answer(chat(messages=LONG, max_tokens=max_tokens))
        assert status == 200
        assert len(replica.generations) == 1


async def test_max_completion_tokens_counts_before_max_tokens() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        status, _, _ = await gateway.answer(chat(max_tokens=9000, max_completion_tokens=5))
        assert status == 200
        status, body, _ = await gateway.answer(chat(max_tokens=5, max_completion_tokens=9000))
        error = error_of(body)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == "max_completion_tokens"
        assert error["message"].endswith("Lower max_completion_tokens.")


async def refused_for_n(gateway: Gateway, request: dict[str, object], path: str) -> str:
    """Why a request, or the question after one, is refused for its number of completions."""
    status, body, _ = await gateway.answer(request, path)
    if path == "/v1/admission":
        assert (body["admitted"], body["status"]) == (False, 400)
        return str(body["message"])
    error = error_of(body)
    assert (status, error["param"], error["code"]) == (400, "n", None)
    return str(error["message"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/admission"])
@pytest.mark.parametrize("fields", [{"n": 9}, {"n": 3, "prompt": ["a", "b", "c"]}])
async def test_more_completions_than_ever_run_together_are_400(
    path: str, fields: dict[str, object]
) -> None:
    async with FaultyReplica() as replica:
        replica.load = {"max_total_num_tokens": 4096, "max_running_requests": 8}
        async with running_gateway(replica.url, ready=1) as gateway:
            request: dict[str, object] = {"model": "tiny", "prompt": "a", "max_tokens": 1, **fields}
            message = await refused_for_n(gateway, request, path)
            assert "9 completions" in message
            assert "more than 8 together" in message
            assert (await gateway.raw({**request, "n": 1}, "/v1/completions"))[0] == 200
            assert len(replica.generations) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/admission"])
async def test_completions_that_no_pool_holds_together_are_400(path: str) -> None:
    async with FaultyReplica() as replica:
        replica.load = {"max_total_num_tokens": 4096, "max_running_requests": 8}
        async with running_gateway(replica.url, ready=1) as gateway:
            request: dict[str, object]
            request = {"model": "tiny", "prompt": [5] * 96, "max_tokens": 1001, "n": 4}
            message = await refused_for_n(gateway, request, path)
            assert "4 completions" in message
            assert "1001 tokens each and 96 in the prompt need 4100 tokens" in message
            assert "holds more than 4096. Lower n or max_tokens." in message
            fits = {**request, "max_tokens": 1000}
            assert (await gateway.raw(fits, "/v1/completions"))[0] == 200
            assert len(replica.generations) == 1


async def test_short_request_is_not_counted() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        assert (await gateway.answer(chat(max_tokens=100)))[0] == 200
        assert (await gateway.answer(chat()))[0] == 200
        assert replica.tokenized == []
        assert await gateway.metric(BOUNDED) == 2


async def test_count_is_asked_with_the_request_itself() -> None:
    """Fields that shape the prompt must reach the tokenizer, whatever they are."""
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        request = chat(messages=LONG, tools=[], chat_template_kwargs={"thinking": False})
        assert (await gateway.answer(request))[0] == 200
        assert [received.json for received in replica.tokenized] == [request]
        assert await gateway.metric(COUNTED) == 1


async def test_a_field_of_the_other_route_does_not_count() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        assert (await gateway.answer(chat(prompt=[1] * 30000)))[0] == 200
        assert replica.generations[0].json["prompt"] == [1] * 30000
        for odd in ("x", 5, [5]):
            request: dict[str, object] = {"model": "tiny", "prompt": "hi", "messages": odd}
            status, _, _ = await gateway.answer(request, "/v1/completions")
            assert status == 200
            assert replica.generations[-1].json["messages"] == odd


async def test_prompt_of_token_ids_is_counted_here() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        request: dict[str, object] = {"model": "tiny", "prompt": [7] * 4090}
        status, body, _ = await gateway.answer(request, "/v1/completions")
        error = error_of(body)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        request = {"model": "tiny", "prompt": [[7] * 4000, [7]], "max_tokens": 97}
        status, body, _ = await gateway.answer(request, "/v1/completions")
        assert (status, error_of(body)["code"]) == (400, "context_length_exceeded")
        assert replica.tokenized == []


async def test_routed_to_the_replica_that_can_hold_it() -> None:
    async with FaultyReplica() as small, FaultyReplica() as large:
        large.server_info = {"max_total_num_tokens": 8192, "max_req_input_len": 8186}
        for replica in (small, large):
            replica.prompt_tokens = 6000
        async with running_gateway(small.url, large.url, ready=2) as gateway:
            for _ in range(4):
                assert (await gateway.answer(chat(messages=LONG)))[0] == 200
            assert [len(small.generations), len(large.generations)] == [0, 4]


async def test_tokenizer_that_fails_is_seen_and_the_replica_decides() -> None:
    async def overlong(request: Received) -> None:
        await request.replay("err_overlong_chat_stream")

    async with gateway_over(overlong) as (gateway, (replica,)):
        replica.prompt_tokens = None
        status, body, _ = await gateway.answer(chat(messages=LONG, stream=True))
        assert (status, error_of(body)["code"]) == (400, "context_length_exceeded")
        assert len(replica.generations) == 1
        assert await gateway.metric(FAILED) == 1
        kind = f'longleaf_gateway_upstream_errors_total{{kind="tokenize",replica="{replica.url}"}}'
        assert await gateway.metric(kind) == 1


@pytest.mark.parametrize(
    "name",
    [
        "err_overpool_chat_stream",  # status 200: the error is the stream's first event
        "err_overpool_chat",
        "err_overlong_chat",
        "err_overlong_chat_stream",
        "err_prompt_plus_max_tokens",
        "q_prompt_plus_max_slightly_over_stream",
    ],
)
async def test_overflow_that_the_replica_finds_is_400_context_length_exceeded(name: str) -> None:
    async def behaviour(request: Received) -> None:
        await request.replay(name)

    async with gateway_over(behaviour, behaviour) as (gateway, replicas):
        for stream in (True, False):
            status, body, response = await gateway.answer(chat(stream=stream))
            error = error_of(body)
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert response.headers["x-should-retry"] == "false"
            assert response.headers["content-type"] == "application/json"
            assert error["message"].encode() in captured(name)
        assert sum(len(replica.generations) for replica in replicas) == 2  # no retry
        assert replicas[0].aborted.empty()


async def test_first_event_may_come_in_parts() -> None:
    error = b'data: {"error": {"message": "Input length (9 tokens) exceeds the maximum allowed length (4 tokens).", "code": 400}}\n\n'  # noqa: E501

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(b": wait\n\n" + error[:30])
        await request.chunk(error[30:])
        await request.chunk(DONE)
        await request.end_stream()

    async with gateway_over(behaviour) as (gateway, _):
        status, body, _ = await gateway.answer(chat(stream=True))
        assert (status, error_of(body)["code"]) == (400, "context_length_exceeded")


async def test_word_error_in_the_text_is_no_error() -> None:
    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event('"error": {}') + DONE)
        await request.end_stream()

    async with gateway_over(behaviour) as (gateway, _):
        assert (await gateway.raw(chat(stream=True)))[0] == 200


@pytest.mark.parametrize(
    ("request_fields", "bound"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, 100 + 256 + 16),
        ({"messages": [{"role": "user"}, {"role": "user"}]}, 100 + 256 + 32),
        ({"messages": [{"content": [{"type": "text", "text": "x"}]}]}, 100 + 256 + 16),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, None),
        ({"messages": [{"content": "x"}], "tools": [{}]}, None),
        ({"messages": [{"content": "x"}], "tools": []}, 100 + 256 + 16),
        ({"messages": [{"content": "x"}], "chat_template_kwargs": {"a": 1}}, None),
        ({"prompt": "x"}, 100 + 16),
    ],
)
def test_token_bound(request_fields: dict[str, object], bound: int | None) -> None:
    assert token_bound(request_fields, 100) == bound


def test_limits() -> None:
    limits = ReplicaLimits(8192, 4090, 4096)
    assert (limits.prompt_limit, limits.total_limit) == (4089, 4096)
    assert limits.admits(4089, 7)
    assert not limits.admits(4089, 8)
    assert not limits.admits(4090, 1)
    assert ReplicaLimits(None, None, None).admits(10**9, 10**9)
    assert not ReplicaLimits(8, None, None).admits(8, None)


def test_context_length_is_the_model_cards() -> None:
    models = {"data": [{"id": "a", "max_model_len": 100}]}
    facts = parse_facts(models, {"context_length": None, "max_total_num_tokens": 50})
    assert facts.limits == ReplicaLimits(100, None, 50)
    facts = parse_facts({"data": [{"id": "a"}]}, {"context_length": 70})
    assert facts.limits == ReplicaLimits(70, None, None)


@pytest.mark.parametrize(
    ("models", "server_info", "why"),
    [
        ([], {}, "without a list"),
        ({"data": []}, {}, "no model"),
        ({"data": [{"id": 5}]}, {}, "no model"),
        ({"data": [{"id": "a"}]}, [], "no object"),
    ],
)
def test_facts_that_make_no_sense(models: object, server_info: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_facts(models, server_info)
