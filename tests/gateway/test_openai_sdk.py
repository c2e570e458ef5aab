"""The real ``openai`` SDK, through the gateway, to the real embedded engine."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from tests.gateway.engine import Engine, running_engine
from tests.gateway.faulty_replica import DONE, Received, event
from tests.gateway.running import LIMIT, Gateway, chat, eventually, gateway_over, running_gateway

pytestmark = pytest.mark.anyio

POOL = 3000
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count from 1 to 20."}]
LONG: list[ChatCompletionMessageParam] = [{"role": "user", "content": "one two three " * 1500}]
ENDLESS: dict[str, Any] = {"max_tokens": 2500, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    limits = ("--max-running-requests", "1", "--max-queued-requests", "1")
    with running_engine("--max-total-tokens", str(POOL), *limits) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(engine: Engine) -> str:
    return str(engine.get("/v1/models")["data"][0]["id"])


@asynccontextmanager
async def client_of(gateway: Gateway, **settings: Any) -> AsyncIterator[AsyncOpenAI]:
    defaults = {"api_key": "none", "base_url": gateway.url + "/v1"}
    async with AsyncOpenAI(**{**defaults, **settings}) as client:
        yield client


@asynccontextmanager
async def served(engine: Engine, **settings: Any) -> AsyncIterator[tuple[Gateway, AsyncOpenAI]]:
    async with (
        running_gateway(engine.url, ready=1, health_interval=5.0, **settings) as gateway,
        client_of(gateway) as client,
    ):
        yield gateway, client


def requests(code: int, reason: str) -> str:
    labels = f'code="{code}",reason="{reason}",route="chat_completions"'
    return f"longleaf_gateway_requests_total{{{labels}}}"


async def test_streamed_and_whole_answers_say_the_same(engine: Engine, model: str) -> None:
    async with served(engine) as (_, client):
        whole = await client.chat.completions.create(
            model=model, messages=ASK, max_tokens=40, temperature=0
        )
        text = whole.choices[0].message.content
        assert text
        assert whole.usage is not None
        assert 0 < whole.usage.completion_tokens <= 40

        stream = await client.chat.completions.create(
            model=model,
            messages=ASK,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert said == text
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert reasons[-1] == whole.choices[0].finish_reason
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert len({chunk.id for chunk in chunks}) == 1
        assert len(chunks[0].id) == 32


async def test_plain_streams_are_charged_by_the_engines_usage(
    engine: Engine, model: str, tmp_path: Path
) -> None:
    """The SDK's default stream tells no usage: the gateway gets it, the client sees none."""
    keys = tmp_path / "keys"
    keys.write_text("limited tokens_per_minute=600\n")
    async with (
        running_gateway(engine.url, ready=1, health_interval=5.0, api_key_file=keys) as gateway,
        client_of(gateway, api_key="limited", max_retries=0) as client,
    ):

        async def ask() -> list[ChatCompletionChunk]:
            stream = await client.chat.completions.create(
                model=model,
                messages=ASK,
                max_tokens=400,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            return [chunk async for chunk in stream]

        chunks = await ask()
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.RateLimitError) as caught:
            await ask()  # over 400 of 600 are used
        assert "600 tokens a minute" in caught.value.message
        assert int(caught.value.response.headers["retry-after"]) > 10


async def test_completions_and_models(engine: Engine, model: str) -> None:
    async with served(engine) as (_, client):
        answer = await client.completions.create(
            model=model, prompt="one two three one two three one", max_tokens=8, temperature=0
        )
        assert answer.choices[0].text
        listed = [card.id async for card in client.models.list()]
        assert listed == [model]
        assert (await client.models.retrieve(model)).id == model
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_fields_of_the_engine_pass_through_the_sdk(engine: Engine, model: str) -> None:
    async with served(engine) as (_, client):
        answer = await client.chat.completions.create(
            model=model,
            messages=ASK,
            max_tokens=12,
            extra_body={"ignore_eos": True, "return_spec_tokens_details": True},
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12
        plain = await client.chat.completions.create(
            model=model, messages=ASK, max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert plain.usage is not None
        assert len(answer.usage.model_dump_json()) > len(plain.usage.model_dump_json())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields", [{"messages": LONG}, {"messages": ASK, "max_tokens": POOL}])
async def test_what_never_fits_is_a_bad_request_that_the_sdk_does_not_retry(
    engine: Engine, model: str, fields: dict[str, Any], stream: bool
) -> None:
    async with served(engine) as (gateway, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=model, stream=stream, **fields)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert str(POOL) in caught.value.message
        assert await gateway.metric(requests(400, "context_length_exceeded")) == 1


async def test_gateway_and_engine_count_the_same_tokens(engine: Engine, model: str) -> None:
    """The longest prompt that is let through is answered; one token more never runs."""
    async with served(engine) as (_, client):
        first = await client.chat.completions.create(model=model, messages=ASK)
        assert first.usage is not None
        room = POOL - first.usage.prompt_tokens
        fits = await client.chat.completions.create(
            model=model, messages=ASK, max_tokens=room, temperature=0, stop="5"
        )
        assert fits.choices
        with pytest.raises(openai.BadRequestError, match=str(first.usage.prompt_tokens)):
            await client.chat.completions.create(model=model, messages=ASK, max_tokens=room + 1)


async def test_what_only_the_engine_refuses_is_named_too(engine: Engine, model: str) -> None:
    wizard: Any = [{"role": "wizard", "content": "hi"}]
    async with served(engine) as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=model, messages=wizard)
        assert caught.value.param == "messages[0].role"
        assert "messages[0].role: Input should be 'system', 'developer'" in caught.value.message
        assert "validation error" not in caught.value.message


async def test_wrong_parameter_is_a_bad_request_with_its_name(engine: Engine, model: str) -> None:
    async with served(engine) as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=model, messages=ASK, temperature=-1)
        assert caught.value.param == "temperature"
        assert caught.value.type == "invalid_request_error"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=model, messages=[])
        assert caught.value.param == "messages"


async def test_wrong_key_is_an_authentication_error(
    engine: Engine, model: str, tmp_path: Path
) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("right\n")
    async with served(engine, api_key_file=key_file) as (gateway, client):
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(model=model, messages=ASK)
        assert caught.value.code == "invalid_api_key"
        async with client_of(gateway, api_key="right") as known:
            await known.chat.completions.create(model=model, messages=ASK, max_tokens=1)


async def test_unknown_model_is_a_not_found_error(engine: Engine) -> None:
    async with served(engine) as (_, client):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="other", messages=ASK)
        assert caught.value.code == "model_not_found"


async def test_body_over_the_limit_is_a_413(engine: Engine, model: str) -> None:
    async with served(engine, max_body_bytes=2000) as (_, client):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model=model, messages=LONG)
        assert caught.value.status_code == 413
        assert "2000 bytes" in caught.value.message


@asynccontextmanager
async def busy(engine: Engine, model: str, answers: int) -> AsyncIterator[None]:
    """Inside, the engine runs one answer for somebody else, and the further ones wait in it."""
    async with AsyncOpenAI(api_key="none", base_url=engine.url + "/v1") as direct:
        await eventually(lambda: engine.load == (0, 0))
        create = direct.chat.completions.create
        tasks = []
        for number in range(answers):
            tasks.append(asyncio.create_task(create(model=model, messages=ASK, **ENDLESS)))
            await eventually(partial(has_load, engine, (1, number)))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def has_load(engine: Engine, load: tuple[int, int]) -> bool:
    return engine.load == load


@pytest.mark.parametrize("stream", [True, False])
async def test_full_queue_is_a_rate_limit_error(engine: Engine, model: str, stream: bool) -> None:
    async with served(engine, queue_size=1) as (gateway, client):
        create = client.chat.completions.create
        await eventually(lambda: engine.load == (0, 0))
        running = asyncio.create_task(create(model=model, messages=ASK, **ENDLESS))
        await eventually(lambda: engine.load == (1, 0))
        queued = asyncio.create_task(create(model=model, messages=ASK, **ENDLESS))
        async with asyncio.timeout(LIMIT):
            while await gateway.metric("longleaf_gateway_queue_depth") != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.with_options(max_retries=0).chat.completions.create(
                model=model, messages=ASK, stream=stream
            )
        assert caught.value.code == "rate_limit_exceeded"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 120
        assert await gateway.metric(requests(429, "rate_limit_exceeded")) == 1
        assert engine.load == (1, 0)  # who waits, waits in the gateway
        for task in (running, queued):
            task.cancel()
        await asyncio.wait({running, queued})
        await eventually(lambda: engine.load == (0, 0))


@pytest.mark.parametrize("stream", [True, False])
async def test_full_queue_of_the_engine_is_one_too(
    engine: Engine, model: str, stream: bool
) -> None:
    """Others filled it: nothing of this gateway runs there, so it tries."""
    async with served(engine) as (gateway, client), busy(engine, model, 2):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.with_options(max_retries=0).chat.completions.create(
                model=model, messages=ASK, stream=stream
            )
        assert caught.value.code == "rate_limit_exceeded"
        assert "retry-after" in caught.value.response.headers
        assert await gateway.metric(requests(429, "rate_limit_exceeded")) == 1


async def test_cancel_in_mid_stream_stops_the_engine(engine: Engine, model: str) -> None:
    """The answer would run for 2,500 tokens; the engine is idle as soon as the client is gone."""
    async with served(engine) as (gateway, client):
        stream = await client.chat.completions.create(
            model=model, messages=ASK, stream=True, **ENDLESS
        )
        chunks = aiter(stream)
        await anext(chunks)
        await eventually(lambda: engine.load == (1, 0))
        await stream.close()
        await eventually(lambda: engine.load == (0, 0))
        assert await gateway.metric('longleaf_gateway_aborts_total{when="after_first_event"}') == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_cancel_before_the_first_token_stops_the_engine(
    engine: Engine, model: str, stream: bool
) -> None:
    """While queued behind another's answer, so that no token of it can have come."""
    async with served(engine) as (gateway, client), busy(engine, model, 1):
        create = client.chat.completions.create
        waiting = asyncio.create_task(create(model=model, messages=ASK, stream=stream, **ENDLESS))
        await eventually(lambda: engine.load == (1, 1))
        waiting.cancel()
        await eventually(lambda: engine.load == (1, 0))
        await asyncio.wait({waiting})
        aborts = 'longleaf_gateway_aborts_total{when="before_first_event"}'
        assert await gateway.metric(aborts) == 1


async def test_engine_killed_in_mid_stream_is_an_api_error_and_then_503() -> None:
    with running_engine() as engine:
        model = str(engine.get("/v1/models")["data"][0]["id"])
        async with served(engine, unhealthy_after=1, recovery_interval=0.1) as (gateway, client):
            stream = await client.chat.completions.create(
                model=model, messages=ASK, stream=True, **ENDLESS
            )
            chunks = aiter(stream)
            await anext(chunks)
            engine.process.kill()
            with pytest.raises(openai.APIError, match="middle of the answer"):
                [_ async for _ in chunks]
            await gateway.until_ready(0)
            with pytest.raises(openai.InternalServerError) as caught:
                await client.with_options(max_retries=0).chat.completions.create(
                    model=model, messages=ASK
                )
            assert caught.value.status_code == 503
            assert caught.value.code == "service_unavailable"
            assert "retry-after" in caught.value.response.headers


async def test_engine_killed_before_the_first_token_is_not_noticed(
    engine: Engine, model: str
) -> None:
    """It waits in an engine that dies, behind another's answer, and moves over to the other."""
    with running_engine("--max-running-requests", "1") as dying:
        settings: dict[str, Any] = {"routing": "round_robin", "health_interval": 5.0}
        async with (
            running_gateway(dying.url, engine.url, ready=2, **settings) as gateway,
            client_of(gateway, max_retries=0) as client,
            busy(dying, model, 1),
        ):
            create = client.chat.completions.create
            waiting = asyncio.create_task(
                create(model=model, messages=ASK, stream=True, max_tokens=20, temperature=0)
            )
            await eventually(lambda: dying.load == (1, 1))
            dying.process.kill()
            moved = [chunk.choices[0].delta.content or "" async for chunk in await waiting]
            whole = await create(model=model, messages=ASK, max_tokens=20, temperature=0)
            assert "".join(moved) == whole.choices[0].message.content
            assert await gateway.metric("longleaf_gateway_retries_total") >= 1


async def test_error_event_in_mid_stream_is_an_api_error() -> None:
    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("one"))
        await request.chunk(event("two")[:-9])
        request.reset()

    async with gateway_over(behaviour) as (gateway, _), client_of(gateway) as client:
        stream = await client.chat.completions.create(model="tiny", messages=ASK, stream=True)
        chunks = aiter(stream)
        assert (await anext(chunks)).choices[0].delta.content == "one"
        with pytest.raises(openai.APIError, match="middle of the answer"):
            await anext(chunks)


async def test_sdk_waits_as_told_and_then_succeeds() -> None:
    """A 429 is retried after ``Retry-After``, here the minimum of 1 s since answers end fast."""
    before_full = 12
    tries = 0

    async def behaviour(request: Received) -> None:
        nonlocal tries
        tries += 1
        if tries == before_full + 1:
            await request.replay("burst_06_stream")
            return
        await request.start_stream()
        await request.chunk(event("at last") + DONE)
        await request.end_stream()

    async with gateway_over(behaviour) as (gateway, (replica,)), client_of(gateway) as client:
        for _ in range(before_full):
            await gateway.raw(chat(stream=True))
        stream = await client.chat.completions.create(model="tiny", messages=ASK, stream=True)
        said = [chunk.choices[0].delta.content async for chunk in stream]
        assert said == ["at last"]
        assert len(replica.generations) == before_full + 2
        assert await gateway.metric(requests(429, "rate_limit_exceeded")) == 1
