"""Every bad input gets a clear error in SGLang's words and shape, and the server goes on."""

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import ServerProcess

LONG = "token cache prefill decode server scheduler "
FLAT = ["object", "message", "type", "param", "code"]


@pytest.fixture(autouse=True)
def still_answers(server: ServerProcess) -> Iterator[None]:
    yield
    assert server.chat(max_tokens=2).json["usage"]["completion_tokens"] == 2
    assert server.load()["num_used_tokens"] == 0
    assert server.get("/health").status == 200


def words(server: ServerProcess, least: int) -> tuple[str, int]:
    """A chat message of at least ``least`` tokens, and the exact length of its prompt."""
    unit = server.post("/tokenize", {"prompt": LONG * 10}).json["count"] / 10
    text = LONG * int(least / unit * 1.05 + 20)
    messages = [{"role": "user", "content": text}]
    return text, int(server.post("/tokenize", {"messages": messages}).json["count"])


CHAT_ERRORS = [
    ({"temperature": -1}, "temperature must be a non-negative finite number, got -1.0."),
    ({"temperature": float("nan")}, "temperature must be a non-negative finite number, got nan."),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
    ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5."),
    ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
    ({"min_p": 2}, "min_p must be in [0, 1], got 2.0."),
    ({"n": 2}, "n must be 1 (one answer a request), got 2."),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ({"max_tokens": -5}, "max_tokens must be at least 1, got -5."),
    ({"messages": []}, "Messages cannot be empty."),
    ({"stop": ["a", ""]}, "stop must not contain an empty string."),
    ({"stop": ["x"] * 65}, "stop must have at most 64 strings, got 65."),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be in [0, 20], got 21."),
    ({"top_logprobs": 3}, "top_logprobs needs logprobs to be true."),
    ({"rid": ""}, "rid must have 1 to 256 characters, got 0."),
    ({"frequency_penalty": 0.5}, "frequency_penalty is not supported by the embedded engine."),
    ({"presence_penalty": -1}, "presence_penalty is not supported by the embedded engine."),
    ({"repetition_penalty": 1.1}, "repetition_penalty is not supported by the embedded engine."),
    ({"logit_bias": {"5": 1}}, "logit_bias is not supported by the embedded engine."),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ({"min_tokens": 4}, "min_tokens is not supported by the embedded engine."),
    (
        {"max_tokens": 8202},
        "max_completion_tokens is too large: 8202.This model supports at most "
        "8192 completion tokens.",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "Model only supports text input; received unsupported content type 'image_url'.",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "message"), CHAT_ERRORS, ids=lambda v: str(v)[:40])
def test_bad_values(
    server: ServerProcess, fields: dict[str, Any], message: str, stream: bool
) -> None:
    reply = server.chat(stream=stream, **fields)
    assert reply.status == 400
    assert list(reply.json) == FLAT
    assert message in reply.json["message"]
    assert {**reply.json, "message": ""} == {
        "object": "error",
        "message": "",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model": "tiny", "messages": [', "1 validation error:\n  {'type': 'json_invalid', "
         "'loc': ('body', 31), 'msg': 'JSON decode error'"),
        (b'{"model": "tiny"}', "1 validation error:\n  {'type': 'missing', 'loc': ('body', "
         "'messages'), 'msg': 'Field required'"),
        (b"[]", "('body',)"),
        (b"", "json_invalid"),
        (b"\xff\xfe", "json_invalid"),
        (b'{"messages": [{"role": "king", "content": "x"}]}', "('body', 'messages', 0, 'role')"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "'messages', 0, 'content'"),
        (b'{"messages": "x"}', "('body', 'messages')"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}', "'max_tokens'"),
        (b'{"messages": [{"role": "user", "content": "x"}], "rid": ["a"]}', "'rid'"),
        (b'{"messages": [' + b"1," * 99_999 + b"1]}", "1 validation error:"),
        (b'{"messages": [], "stop": [' + b"1," * 999 + b"1]}", "2 validation errors:"),
        (b"[" * 100_000, "json_invalid"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "json_invalid"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogates"),
        (b'{"model": "\\uDFFF", "messages": [{"role": "user", "content": "x"}]}', "surrogates"),
    ],
    ids=lambda v: str(v)[:30],
)  # fmt: skip
def test_malformed_bodies(server: ServerProcess, body: bytes, message: str) -> None:
    reply = server.post("/v1/chat/completions", body)
    assert (reply.status, list(reply.json)) == (400, FLAT)
    assert (reply.json["type"], reply.json["code"]) == ("Bad Request", 400)
    assert message in reply.json["message"]
    assert len(reply.json["message"]) < 5000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "Prompt cannot be empty"),
        ({"prompt": []}, "Prompt cannot be empty"),
        ({"prompt": ["a", "b"]}, "a batch of 2 is not supported"),
        ({"prompt": [[1], [2]]}, "a batch of 2 is not supported"),
        ({"prompt": [1, 9999]}, "token ids outside 0..4095"),
        ({"prompt": [10**30]}, "token ids outside 0..4095"),
        ({"prompt": [-(10**30)]}, "token ids outside 0..4095"),
        ({"prompt": [True]}, "'prompt'"),
        ({"prompt": "x", "max_tokens": 10**30}, "Requested token count exceeds"),
        ({"prompt": "x", "echo": True}, "echo is not supported."),
        ({"prompt": "x", "suffix": "y"}, "suffix is not supported."),
        ({"prompt": "x", "best_of": 2}, "best_of is not supported."),
        ({"prompt": "x", "logprobs": 30}, "top_logprobs must be in [0, 20], got 30."),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({}, "'prompt'"),
    ],
    ids=lambda v: str(v)[:30],
)  # fmt: skip
def test_bad_completions(server: ServerProcess, fields: dict[str, object], message: str) -> None:
    reply = server.post("/v1/completions", fields)
    assert reply.status == 400
    assert message in reply.json["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_longer_than_the_context(server: ServerProcess, stream: bool) -> None:
    text, count = words(server, 8200)
    reply = server.chat(text, stream=stream, max_tokens=4)
    assert (reply.status, reply.json["type"]) == (400, "BadRequestError")
    assert reply.json["message"] == (
        f"The input ({count} tokens) is longer than the model's context length (8192 tokens)."
    )
    reply = server.chat("hi", stream=stream, max_tokens=8190)
    asked = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json[
        "count"
    ]
    assert reply.status == 400
    assert reply.json["message"] == (
        f"Requested token count exceeds the model's maximum context length of 8192 tokens. You "
        f"requested a total of {8190 + asked} tokens: {asked} tokens from the input messages and "
        f"8190 tokens for the completion. Please reduce the number of tokens in the input messages "
        f"or the completion to fit within the limit."
    )


def test_much_longer_than_the_context_is_refused_without_tokenizing(server: ServerProcess) -> None:
    """20 MB that would take the tokenizer a minute and a gigabyte: its size alone tells."""
    text = "a " * 10_000_000
    pid = server.process.pid
    before = resident_bytes(pid)
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/completions": {"prompt": text},
        "/tokenize": {"prompt": text},
    }
    for path, body in bodies.items():
        reply = server.post(path, body)
        assert reply.status == 400
        assert re.search(
            r"The input \(at least \d+ tokens\) is longer than the model's context length "
            r"\(8192 tokens\)",
            reply.json["message"],
        )
    assert resident_bytes(pid) - before < 400e6


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_longer_than_the_pool(server: ServerProcess) -> None:
    text, count = words(server, 4100)
    message = (
        f"Input length ({count} tokens) exceeds the maximum allowed length (4090 tokens). "
        f"Use a shorter input or enable --allow-auto-truncate."
    )
    flat: dict[str, Any] = {"object": "error", "message": message, "type": "BadRequestError"}
    flat |= {"param": None, "code": 400}
    reply = server.chat(text, max_tokens=4)
    assert (reply.status, reply.json) == (400, flat)
    reply = server.chat(text, max_tokens=4, stream=True)
    assert reply.status == 200
    assert reply.events == [{"error": flat | {"type": "BAD_REQUEST"}}]


def test_a_full_queue(server: ServerProcess) -> None:
    """Four run, two wait, further ones are refused: 503, or the first event of a stream."""
    connections = [server.connect() for _ in range(6)]
    for number, connection in enumerate(connections):
        server.send_chat(connection, f"wait {number}", max_tokens=2000)
    server.until(lambda: server.load()["num_waiting_reqs"] == 2)
    assert server.load()["num_running_reqs"] == 4
    message = "The request queue is full."
    flat: dict[str, Any] = {"object": "error", "message": message, "type": "503"}
    flat |= {"param": None, "code": 503}
    reply = server.chat()
    assert (reply.status, reply.json) == (503, flat)
    reply = server.chat(stream=True)
    assert reply.status == 200
    assert reply.events == [{"error": flat | {"type": "SERVICE_UNAVAILABLE"}}]
    server.post("/abort_request", {"abort_all": True})
    for connection in connections:
        assert json.loads(connection.getresponse().read())["choices"][0]["finish_reason"] == "abort"
        connection.close()
    server.until(lambda: server.load()["num_used_tokens"] == 0)


def test_waiting_requests_are_served_in_the_end(server: ServerProcess) -> None:
    results: list[int] = []

    def one(number: int) -> None:
        reply = server.chat(f"wait {number}", max_tokens=200)
        results.append(reply.json["usage"]["completion_tokens"])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [200] * 6
    server.until(lambda: server.load()["num_used_tokens"] == 0)


def test_paths_and_methods(server: ServerProcess) -> None:
    reply = server.get("/nope")
    assert (reply.status, reply.json) == (404, {"detail": "Not Found"})
    reply = server.get("/v1/chat/completions")
    assert (reply.status, reply.json) == (405, {"detail": "Method Not Allowed"})
    assert server.get("/ready").status == 404
    reply = server.get("/v1/models/other")
    assert (reply.status, reply.json["message"]) == (404, "The model 'other' does not exist")


def test_content_type(server: ServerProcess) -> None:
    reply = server.send("POST", "/v1/chat/completions", b"{}", {"Content-Type": "text/plain"})
    assert reply.status == 400
    assert "Only 'application/json' is allowed" in reply.json["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/abort_request"])
def test_bad_bodies_elsewhere(server: ServerProcess, path: str) -> None:
    assert server.post(path, b"{").status == 400
    assert server.post(path, {"rid": 5, "tokens": [99999], "prompt": 3}).status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 10**40},
        {"seed": -1, "temperature": 1.0},
        {"top_k": 10**30, "temperature": 1.0},
        {"stop_token_ids": [10**30, -5]},
        {"temperature": 1e308},
        {"temperature": 2e-6},
        {"temperature": 1e-300},
        {"top_p": 1e-300, "temperature": 1.0},
        {"min_p": 1.0, "temperature": 5.0},
        {"chat_template_kwargs": {"messages": [], "add_generation_prompt": False}},
        {"messages": [{"role": "assistant", "content": None}, {"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": "<|end|><|assistant|>\x00\U0001f642"}]},
    ],
    ids=lambda v: str(v)[:40],
)
def test_odd_but_fine(server: ServerProcess, fields: dict[str, Any]) -> None:
    reply = server.chat(**{"max_tokens": 6, **fields})
    assert reply.status == 200, reply.json
    assert reply.json["usage"]["completion_tokens"] == 6
