"""What the probes read of an answer: SGLang's own API, and servers that tell no steps."""

import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from longleaf.probes.client import Answer, ProbeError, Server, complete, find_server, steps_of
from longleaf.probes.prompts import prompt_of

pytestmark = pytest.mark.anyio


LISTED = {"data": [{"id": "longleaf", "max_model_len": 2048}]}


class Replayed:
    """A server that answers a stream of ``chunks``, bytes as they are; keeps the bodies it got."""

    def __init__(self, chunks: Sequence[dict[str, Any] | bytes], path: str, models: Any) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._chunks, self._listed = chunks, models
        app = web.Application()
        app.router.add_post(path, self._stream)
        app.router.add_get("/v1/models", self._models)
        self.server = TestServer(app)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(self._listed)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for chunk in self._chunks:
            data = chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()
            await answer.write(b"data: " + data + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer


@asynccontextmanager
async def replaying(
    chunks: Sequence[dict[str, Any] | bytes], path: str, models: Any = LISTED
) -> AsyncIterator[tuple[Replayed, aiohttp.ClientSession, Server]]:
    replayed = Replayed(chunks, path, models)
    async with replayed.server, aiohttp.ClientSession() as http:
        server = await find_server(http, str(replayed.server.make_url("")).rstrip("/"))
        yield replayed, http, server


def told(tokens: int, **more: Any) -> dict[str, Any]:
    """A chunk of SGLang 0.5.17's /generate (tokenizer_manager.py: meta_info is cumulative)."""
    meta = {"id": "1", "prompt_tokens": 9, "completion_tokens": tokens, "cached_tokens": 8}
    return {"text": "x" * tokens, "output_ids": [], "meta_info": {**meta, **more}}


def steps_told(tokens: int, steps: int, drafts: int) -> dict[str, Any]:
    return told(
        tokens,
        spec_verify_ct=steps,
        spec_accept_length=tokens / steps,
        spec_num_correct_drafts=drafts,
        spec_num_proposed_drafts=7 * steps,
    )


async def test_sglangs_own_api_tells_steps_and_counts_the_first_token_among_them() -> None:
    chunks = [told(1), steps_told(5, 1, 3), steps_told(5, 1, 3), steps_told(8, 2, 5)]
    async with replaying(chunks, "/generate") as (replayed, http, server):
        assert server == Server(server.url, "longleaf", native=True, limit=2048)
        answer = await complete(http, server, "count", max_tokens=8)
    assert replayed.bodies == [
        {
            "text": "count",
            "sampling_params": {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True},
            "stream": True,
        }
    ]
    assert (answer.prompt_tokens, answer.completion_tokens) == (9, 8)
    assert (answer.steps, answer.correct_drafts, answer.proposed_drafts) == (2, 5, 14)
    assert answer.commit_len == pytest.approx(3.5)  # 7 tokens in 2 steps
    assert answer.events == 3


async def test_an_error_in_the_stream_is_reported() -> None:
    async with replaying([{"error": {"message": "too long"}}], "/generate") as (_, http, server):
        with pytest.raises(ProbeError, match="too long"):
            await complete(http, server, "count", max_tokens=8)


@pytest.mark.parametrize(
    "models", [[1, 2], None, {"data": None}, {"data": []}, {"data": [1]}, {"data": [{"name": "x"}]}]
)
async def test_a_server_that_lists_no_model_is_named(models: Any) -> None:
    with pytest.raises(ProbeError, match="/v1/models lists no model"):
        async with replaying([], "/v1/completions", models):
            pass


@pytest.mark.parametrize("length", [None, "2048", 0, -1])
async def test_a_limit_that_nobody_tells_refuses_nothing(length: Any) -> None:
    models = {"data": [{"id": "x", "max_model_len": length}]}
    async with replaying([], "/v1/completions", models) as (_, _, server):
        assert server.limit is None
        assert server.refuses(1 << 20, 64) == ""


def test_a_context_and_its_answer_must_fit() -> None:
    server = Server("u", "m", limit=2048)
    assert server.refuses(1984, 64) == ""
    assert "2048 tokens, answer included" in server.refuses(1985, 64)


TEXT = {"choices": [{"text": "x"}]}
USAGE = {"prompt_tokens": 9, "completion_tokens": 8}


def ended(**usage: Any) -> list[dict[str, Any]]:
    return [TEXT, {"choices": [], "usage": {**USAGE, **usage}}]


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([b"{not json"], "not understood"),
        ([b"\xff\xfe"], "not understood"),
        ([b"[1, 2]"], "'\\[1, 2\\]' is no object"),
        ([b"null"], "is no object"),
        ([{"error": "boom"}], "^boom$"),
        ([{"error": ["boom"]}], "boom"),
        ([{"choices": None}], "not understood"),
        ([b'{"choices": [{"text": "' + b"x" * 600_000 + b'"}]}'], "not understood: .*bytes"),
        ([TEXT], "no text or no usage"),
        ([TEXT, {"usage": [1]}], "not understood"),
        (ended(prompt_tokens=0), "prompt_tokens is 0"),
        (ended(prompt_tokens=None), "prompt_tokens is None"),
        (ended(completion_tokens="8"), "completion_tokens is '8'"),
        (ended(spec_tokens_details={"steps": "many"}), "steps is 'many'"),
        (ended(spec_tokens_details={"steps": -5}), "steps is -5"),
        (ended(spec_tokens_details={"steps": 2, "commit_len": float("nan")}), "commit_len is nan"),
        (ended(spec_tokens_details=[2]), "spec_tokens_details"),
    ],
)
async def test_an_answer_that_is_none_is_one_sentence(
    chunks: list[dict[str, Any] | bytes], said: str
) -> None:
    async with replaying(chunks, "/v1/completions") as (_, http, server):
        with pytest.raises(ProbeError, match=said) as caught:
            await complete(http, server, "count", max_tokens=8)
    assert len(str(caught.value)) < 300


async def test_a_count_of_tokens_that_cannot_be_builds_no_endless_prompt() -> None:
    async with replaying(ended(prompt_tokens=1), "/v1/completions") as (_, http, server):
        with pytest.raises(ProbeError, match="counts 1 tokens in 30"):
            await prompt_of(http, server, "predictable", 300, 0)


@pytest.mark.parametrize("events", [2, 8])
async def test_steps_that_nobody_tells_are_not_guessed(events: int) -> None:
    """SGLang 0.5.17 behind the gateway: of several tokens an event, time a step is unknown."""
    chunks: list[dict[str, Any]] = [{"choices": [{"text": "xx"}]} for _ in range(events)]
    usage = {"prompt_tokens": 9, "completion_tokens": 8}
    async with replaying([*chunks, {"choices": [], "usage": usage}], "/v1/completions") as (
        replayed,
        http,
        server,
    ):
        assert not server.native
        answer = await complete(http, server, "count", max_tokens=8)
    assert replayed.bodies[0]["return_spec_tokens_details"] is True
    assert (answer.steps, answer.events) == (0, events)
    if events == 8:
        assert steps_of(answer) == 7
    else:
        with pytest.raises(ProbeError, match="8 tokens came in 2 events and no steps are told"):
            steps_of(answer)


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (503, '{"error": {"message": "no replica is ready"}}', "status 503: no replica is ready"),
        (404, "<html>", "status 404: is it an OpenAI server[?]"),
        (401, "", "status 401: give the key [(]--api-key[)]"),
    ],
)
async def test_a_server_that_is_not_ready_is_said_to_be(status: int, body: str, why: str) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        with pytest.raises(ProbeError, match=why):
            await find_server(http, str(server.make_url("")).rstrip("/"))


@pytest.mark.parametrize("steps", [1, 9, 10**30])
async def test_steps_that_cannot_be_are_not_divided_by(steps: int) -> None:
    """Eight tokens in four events, of which one is prefill's."""
    answer = Answer(9, 8, steps, 7 / steps, 0, 0, 4, 0.1, 0.5)
    with pytest.raises(ProbeError, match=f"reports {str(steps)[:12]} steps, of 8 tokens in 4 ev"):
        steps_of(answer)
    for possible in (3, 7):
        assert steps_of(dataclasses.replace(answer, steps=possible)) == possible


async def test_true_is_no_count() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 8, "spec_tokens_details": {"steps": True}}
    chunks = [{"choices": [{"text": "x"}], "usage": usage}]
    async with replaying(chunks, "/v1/completions") as (_, http, server):
        with pytest.raises(ProbeError, match="the answer's steps is True, no count"):
            await complete(http, server, "", max_tokens=8)
