"""Rows of the contract that are decided before a replica is asked."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from starlette.types import Message, Receive, Scope, Send

from longleaf.gateway.api.front import Front
from longleaf.gateway.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from longleaf.gateway.drain import Drain
from longleaf.metrics import GatewayMetrics
from tests.gateway.faulty_replica import FaultyReplica, answer_captured_chat
from tests.gateway.running import LIMIT, chat, eventually, gateway_over, running_gateway

pytestmark = pytest.mark.anyio

ENVELOPE = {"message", "type", "param", "code"}


def error_of(body: dict[str, Any]) -> dict[str, Any]:
    """The error inside a body that must be the envelope and nothing else."""
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == ENVELOPE
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(
    "text",
    [
        '{"model": "tiny", "messages": [',
        "",
        "hello",
        "{'a': 1}",
        '{"temperature": NaN}',
        "\ufeff{}",
    ],
)
async def test_malformed_body_is_400_invalid_request(text: str) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, replicas):
        async with gateway.http.post(gateway.url + "/v1/chat/completions", data=text) as response:
            error = error_of(await response.json())
            assert response.status == 400
        assert (error["type"], error["param"]) == ("invalid_request_error", None)
        assert "not valid JSON" in error["message"]
        assert replicas[0].generations == []
        assert (await gateway.answer(chat()))[0] == 200


@pytest.mark.parametrize("text", ["[]", "1", "null", '"text"'])
async def test_body_that_is_no_object_is_400(text: str) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        url = gateway.url + "/v1/chat/completions"
        async with gateway.http.post(url, data=text) as response:
            body = await response.json()
        assert response.status == 400
        assert "JSON object" in error_of(body)["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**30}, "n"),
        ({"max_tokens": 10**4000}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
    ],
)
async def test_bad_parameter_is_400_with_its_name(changes: dict[str, object], param: str) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, replicas):
        status, body, _ = await gateway.answer(chat(**changes))
        error = error_of(body)
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert param in error["message"]
        assert replicas[0].generations == []


@pytest.mark.parametrize("name", ["model", "messages"])
async def test_missing_parameter_is_400_with_its_name(name: str) -> None:
    body = chat()
    del body[name]
    async with gateway_over(answer_captured_chat) as (gateway, _):
        status, answer, _ = await gateway.answer(body)
        error = error_of(answer)
        assert (status, error["param"]) == (400, name)
        assert error["message"] == f"Missing required parameter: {name!r}."


@pytest.mark.parametrize("prompt", [None, 5, [], {}, [1, "a"], [[1], "a"]])
async def test_bad_prompt_is_400(prompt: object) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        status, body, _ = await gateway.answer(
            {"model": "tiny", "prompt": prompt}, "/v1/completions"
        )
        assert (status, error_of(body)["param"]) == (400, "prompt")


WRONG: list[object] = [{}] * 1000


@pytest.mark.parametrize(
    ("schema", "fields"),
    [
        (ChatCompletionRequest, {"messages": [1] * 1000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (ChatCompletionRequest, chat(stop=WRONG)),
        (CompletionRequest, {"prompt": WRONG}),
        (CompletionRequest, {"prompt": [WRONG]}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_list_is_refused_at_its_first_wrong_item(
    schema: type[GenerationRequest], fields: dict[str, object]
) -> None:
    """A million complaints about one body would hold up every stream for seconds."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate({"model": "tiny", **fields})
    assert caught.value.error_count() <= 4  # one for each kind that the field may be


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
async def test_every_kind_of_prompt_passes(prompt: object) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, replicas):
        await gateway.answer({"model": "tiny", "prompt": prompt}, "/v1/completions")
        assert replicas[0].generations[0].json["prompt"] == prompt


async def test_null_is_the_same_as_absent() -> None:
    names = ("max_tokens", "max_completion_tokens", "stream", "stream_options", "temperature")
    fields = dict.fromkeys((*names, "top_p", "n", "stop", "seed"))
    async with gateway_over(answer_captured_chat) as (gateway, _):
        assert (await gateway.answer(chat(**fields)))[0] == 200


async def test_error_message_never_quotes_the_prompt() -> None:
    secret = "the quick brown secret"
    async with gateway_over(answer_captured_chat) as (gateway, _):
        bad = chat(messages=[{"role": secret, "content": {"text": secret}}])
        _, body, _ = await gateway.raw(bad)
        assert secret.encode() not in body


async def test_unknown_path_and_wrong_method_have_the_envelope() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        status, body, _ = await gateway.answer({}, "/v1/nothing")
        assert (status, error_of(body)["code"]) == (404, "not_found")
        async with gateway.http.get(gateway.url + "/v1/chat/completions") as response:
            assert response.status == 405
            assert response.headers["allow"] == "POST"
            assert error_of(await response.json())["code"] == "method_not_allowed"


async def test_unknown_model_is_404_model_not_found() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, replicas):
        status, body, _ = await gateway.answer(chat(model="other"))
        error = error_of(body)
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "other" in error["message"]
        async with gateway.http.get(gateway.url + "/v1/models/other") as response:
            assert response.status == 404
        assert replicas[0].generations == []


async def test_models_are_merged_from_the_replicas() -> None:
    card = {"id": "org/large", "object": "model", "owned_by": "me", "max_model_len": 900}
    async with FaultyReplica() as first, FaultyReplica() as second:
        first.models = {"object": "list", "data": [card, *second.models["data"]]}
        async with running_gateway(first.url, second.url, ready=2) as gateway:
            async with gateway.http.get(gateway.url + "/v1/models") as response:
                listed = await response.json()
            assert listed["object"] == "list"
            assert [model["id"] for model in listed["data"]] == ["org/large", "tiny"]
            async with gateway.http.get(gateway.url + "/v1/models/org/large") as response:
                assert (await response.json())["max_model_len"] == 900
            for _ in range(3):
                assert (await gateway.answer(chat(model="org/large")))[0] == 200
            assert [len(first.generations), len(second.generations)] == [3, 0]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    digest = "9f735e0df9a1ddc702bf0a1a7b83033f9f7153a00c29de82cedadc9957289b05"  # of testpassword
    path.write_text(f"# ours\nfirst-key\n\nsha256:{digest}\n")
    return path


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "first-key", "Basic first-key", "Bearer é"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/nothing"])
async def test_no_or_wrong_key_is_401_invalid_api_key(
    key_file: Path, authorization: str | None, path: str
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    async with gateway_over(answer_captured_chat, api_key_file=key_file) as (gateway, replicas):
        status, body, _ = await gateway.answer(chat(), path, headers=headers)
        assert (status, error_of(body)["code"]) == (401, "invalid_api_key")
        assert replicas[0].generations == []


@pytest.mark.parametrize("key", ["first-key", "testpassword"])
async def test_accepted_key_passes_and_probes_need_none(key_file: Path, key: str) -> None:
    async with gateway_over(answer_captured_chat, api_key_file=key_file) as (gateway, replicas):
        headers = {"authorization": f"Bearer {key}"}
        assert (await gateway.answer(chat(), headers=headers))[0] == 200
        assert replicas[0].generations[0].header("authorization") is None
        for path in ("/livez", "/readyz"):
            async with gateway.http.get(gateway.url + path) as response:
                assert response.status == 200


async def test_body_over_the_limit_is_413_with_the_limit() -> None:
    async with gateway_over(answer_captured_chat, max_body_bytes=1000) as (gateway, replicas):
        big = chat(messages=[{"role": "user", "content": "x" * 1_000_000}])
        status, body, response = await gateway.answer(big)
        assert status == 413
        assert "1000 bytes" in error_of(body)["message"]
        assert response.headers["connection"] == "close"
        assert replicas[0].generations == []
        assert (await gateway.answer(chat()))[0] == 200


async def test_body_of_exactly_the_limit_passes() -> None:
    size = len(json.dumps(chat()).encode())
    async with gateway_over(answer_captured_chat, max_body_bytes=size) as (gateway, _):
        assert (await gateway.answer(chat()))[0] == 200
    async with gateway_over(answer_captured_chat, max_body_bytes=size - 1) as (gateway, _):
        assert (await gateway.answer(chat()))[0] == 413


async def test_chunked_body_over_the_limit_is_413_before_it_ends() -> None:
    """Without content-length: the answer comes while the body is still being sent."""
    async with gateway_over(answer_captured_chat, max_body_bytes=1000) as (gateway, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        writer.write(b"800\r\n" + b"x" * 2048 + b"\r\n")  # and no end
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        error = error_of(json.loads(await reader.readexactly(length)))
        assert error["code"] == "request_too_large"
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_stalls_is_408_and_holds_up_no_drain() -> None:
    async with gateway_over(answer_captured_chat, body_timeout=0.3) as (gateway, replicas):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        await eventually(lambda: gateway.server.drain.running == 1)
        gateway.server.drain.begin()
        assert await gateway.server.drain.finish(LIMIT)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        error = error_of(json.loads(body))
        assert (error["code"], "for 0.3 s" in error["message"]) == ("request_timeout", True)
        assert replicas[0].generations == []
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_drips_is_408_too() -> None:
    settings: dict[str, Any] = {"body_timeout": 0.3, "min_body_rate": 10_000}
    async with gateway_over(answer_captured_chat, **settings) as (gateway, replicas):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        writer.write(b"content-length: 100000\r\n\r\n{")
        answer = asyncio.create_task(reader.read())
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
        head, _, body = answer.result().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert "slower than 10000 bytes a second" in error_of(json.loads(body))["message"]
        assert replicas[0].generations == []
        writer.close()


async def test_a_slow_body_that_keeps_the_rate_is_served() -> None:
    """It takes several times ``body_timeout``."""
    settings: dict[str, Any] = {"body_timeout": 0.3, "min_body_rate": 1_000}
    text = json.dumps(chat(padding="x" * 4_000)).encode()
    async with gateway_over(answer_captured_chat, **settings) as (gateway, replicas):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(text))
        step = len(text) // 10
        for start in range(0, len(text), step):
            writer.write(text[start : start + step])
            await asyncio.sleep(0.1)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        assert len(replicas[0].generations) == 1
        writer.close()


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
async def test_probes_by_head(path: str) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        for status in (200, 200 if path == "/livez" else 503):
            async with gateway.http.head(gateway.url + path) as response:
                assert (response.status, await response.read()) == (status, b"")
                assert int(response.headers["content-length"]) > 0
            gateway.server.drain.begin()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"model": "\\ud800"}'])
async def test_hostile_json_is_400(text: str) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        url = gateway.url + "/v1/chat/completions"
        async with gateway.http.post(url, data=text) as response:
            body = await response.json()
        assert (response.status, error_of(body)["type"]) == (400, "invalid_request_error")


async def test_fault_of_the_gateway_itself_is_500_in_the_envelope() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a secret of the inside")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    metrics = CollectorRegistry()
    front = Front(fail, None, Drain(), GatewayMetrics(metrics))
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
    await front(scope, receive, send)
    assert sent[0]["status"] == 500
    error = error_of(json.loads(sent[1]["body"]))
    assert (error["code"], error["message"]) == ("internal_error", "Internal error.")
    labels = {"route": "models", "code": "500", "reason": "internal_error"}
    assert metrics.get_sample_value("longleaf_gateway_requests_total", labels) == 1


async def test_openapi_document_describes_the_bodies() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        async with gateway.http.get(gateway.url + "/openapi.json") as response:
            document = await response.json()
        operation = document["paths"]["/v1/chat/completions"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ChatCompletionRequest"}
        schemas = document["components"]["schemas"]
        assert {"model", "messages"} <= set(schemas["ChatCompletionRequest"]["properties"])
        assert {"Message", "StreamOptions", "CompletionRequest", "ErrorEnvelope"} <= set(schemas)
        assert {"400", "401", "404", "413", "429", "503"} <= set(operation["responses"])
        assert "422" not in json.dumps(document["paths"])
