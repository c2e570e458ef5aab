"""Answers have SGLang 0.5.17's fields, in the order captured from a real one."""

import json
from typing import Any

import pytest

from .conftest import Reply, ServerProcess

CHAT = ["id", "object", "created", "model", "choices", "usage", "metadata"]
CHOICE = ["index", "message", "logprobs", "finish_reason", "matched_stop"]
MESSAGE = ["role", "content", "reasoning_content", "tool_calls"]
USAGE = [
    "prompt_tokens",
    "total_tokens",
    "completion_tokens",
    "prompt_tokens_details",
    "reasoning_tokens",
]
CHUNK = ["id", "object", "created", "model", "choices"]
DELTA_CHOICE = ["index", "delta", "logprobs", "finish_reason", "matched_stop"]
TEXT_CHOICE = ["index", "text", "logprobs", "finish_reason", "matched_stop"]
SGLANG_SPEC = [
    "spec_accept_rate",
    "spec_accept_length",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_verify_ct",
    "spec_correct_drafts_histogram",
]


def content(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_chat(server: ServerProcess) -> None:
    reply = server.chat()
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    body = reply.json
    assert list(body) == CHAT
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert len(body["id"]) == 32
    choice = body["choices"][0]
    assert list(choice) == CHOICE
    assert list(choice["message"]) == MESSAGE
    assert choice["message"]["role"] == "assistant"
    assert (choice["finish_reason"], choice["matched_stop"], choice["logprobs"]) == (
        "length",
        None,
        None,
    )
    assert list(body["usage"]) == USAGE
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 24
    assert body["metadata"] == {"weight_version": "default"}


def test_chat_stream(server: ServerProcess) -> None:
    whole = server.chat().json["choices"][0]["message"]["content"]
    events = server.chat(stream=True).events
    assert all(list(event) == CHUNK for event in events)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    choices = [event["choices"][0] for event in events]
    assert all(list(choice) == DELTA_CHOICE for choice in choices)
    assert choices[0]["delta"] == {"reasoning_content": None, "role": "assistant", "content": ""}
    assert list(choices[0]["delta"]) == ["reasoning_content", "role", "content"]
    assert all(
        list(choice["delta"]) == ["reasoning_content", "content"] for choice in choices[1:-1]
    )
    assert choices[-1]["delta"] == {"reasoning_content": None}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(events) - 1) + [
        "length"
    ]
    assert content(events) == whole


def test_usage_in_a_stream(server: ServerProcess) -> None:
    events = server.chat(stream=True, stream_options={"include_usage": True}).events
    assert [list(event) for event in events[:-1]] == [CHUNK] * (len(events) - 1)
    assert list(events[-1]) == [*CHUNK, "usage"]
    assert events[-1]["choices"] == []
    assert list(events[-1]["usage"]) == USAGE
    assert events[-1]["usage"] == server.chat().json["usage"]


def test_continuous_usage(server: ServerProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.chat(stream=True, stream_options=options).events
    carrying = events[1:-2]
    assert all(list(event) == [*CHUNK, "usage"] for event in carrying)
    counts = [event["usage"]["completion_tokens"] for event in carrying]
    assert counts == sorted(set(counts))
    assert counts[-1] == 24
    assert [list(events[0]), list(events[-2])] == [CHUNK, CHUNK]


def test_a_tree_step_sends_several_tokens_in_one_event(server: ServerProcess) -> None:
    fields: dict[str, Any] = {"max_tokens": 64, "return_spec_tokens_details": True, "stream": True}
    line = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, "
    events = server.chat(line * 8, **fields, stream_options={"include_usage": True}).events
    details = events[-1]["usage"]["spec_tokens_details"]
    assert list(details) == [*SGLANG_SPEC, "commit_len", "steps"]
    histogram = details["spec_correct_drafts_histogram"]
    assert sum((drafts + 1) * count for drafts, count in enumerate(histogram)) == 64 - 1
    assert details["steps"] == details["spec_verify_ct"] < 63
    assert details["commit_len"] == details["spec_accept_length"] == round(63 / details["steps"], 4)
    assert details["spec_num_correct_drafts"] == 63 - details["steps"]
    assert events[-2]["sglext"] == {"spec_tokens_details": {k: details[k] for k in SGLANG_SPEC}}
    assert events[-2]["choices"] == []
    assert len(events) < 64


def test_spec_details_only_on_request(server: ServerProcess) -> None:
    assert "spec_tokens_details" not in server.chat().json["usage"]
    body = server.chat(return_spec_tokens_details=True, return_cached_tokens_details=True).json
    assert list(body) == [*CHAT, "sglext"]
    assert list(body["sglext"]) == ["cached_tokens_details", "spec_tokens_details"]
    assert body["sglext"]["cached_tokens_details"]["host"] == 0
    plain = server.chat(return_spec_tokens_details=True, speculative=False).json
    assert plain["usage"]["spec_tokens_details"]["commit_len"] == 1.0
    assert plain["usage"]["spec_tokens_details"]["steps"] == 23
    assert plain["choices"] == body["choices"]


def test_logprobs(server: ServerProcess) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 12}
    whole = server.chat(**fields).json["choices"][0]["logprobs"]
    assert list(whole) == ["content"]
    assert len(whole["content"]) == 12
    for entry in whole["content"]:
        assert list(entry) == ["token", "bytes", "logprob", "top_logprobs"]
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert [list(top) for top in entry["top_logprobs"]] == [["token", "bytes", "logprob"]] * 2
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0
    events = server.chat(**fields, stream=True).events
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert pieces[0] is None
    streamed = [entry for piece in pieces if piece for entry in piece["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole["content"]]


def test_stop_string(server: ServerProcess) -> None:
    text = server.chat().json["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:3]
    expected = text[: text.index(stop)]
    reply = server.chat(stop=["\x00", stop]).json
    choice = reply["choices"][0]
    assert choice["message"]["content"] == expected
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
    events = server.chat(stop=stop, stream=True).events
    assert content(events) == expected
    assert events[-1]["choices"][0]["matched_stop"] == stop
    ids = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json["tokens"]
    by_id = server.chat(stop_token_ids=[ids[-1]]).json["choices"][0]
    assert (by_id["finish_reason"], by_id["matched_stop"]) == ("stop", ids[-1])


def test_seeded_answers_repeat(server: ServerProcess) -> None:
    def one(seed: int | None) -> str:
        reply = server.chat(temperature=3.0, seed=seed, max_tokens=40)
        return str(reply.json["choices"][0]["message"]["content"])

    assert one(7) == one(7) != one(8)
    assert one(None) != one(None)


def test_what_is_echoed_and_what_is_ignored(server: ServerProcess) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    reply = server.chat(model="other", rid="my-id", tools=tools, user="u", nonsense=[1], seed=None)
    assert (reply.status, reply.json["model"], reply.json["id"]) == (200, "other", "my-id")
    parts = [{"type": "text", "text": "Count from 1"}, {"type": "text", "text": " to 40."}]
    assert server.chat(parts).json["choices"] == server.chat().json["choices"]  # type: ignore[arg-type]


def test_max_completion_tokens_wins(server: ServerProcess) -> None:
    usage = server.chat(max_tokens=3, max_completion_tokens=5).json["usage"]
    assert usage["completion_tokens"] == 5


def test_more_tokens_than_the_pool_holds_are_clamped_in_silence(server: ServerProcess) -> None:
    prompt = [7] * 4000
    body = {"prompt": prompt, "max_tokens": 4100, "temperature": 0, "ignore_eos": True}
    reply = server.post("/v1/completions", body)
    assert reply.status == 200
    assert reply.json["usage"]["completion_tokens"] == 4095 - 4000 - 1
    assert reply.json["choices"][0]["finish_reason"] == "length"


def completion(server: ServerProcess, prompt: object, **fields: object) -> Reply:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body | fields)


def test_completions(server: ServerProcess) -> None:
    body = completion(server, "Count: 1, 2, 3, 4,").json
    assert list(body) == CHAT
    assert body["object"] == "text_completion"
    assert list(body["choices"][0]) == TEXT_CHOICE
    assert body["usage"]["completion_tokens"] == 16
    ids = server.post("/tokenize", {"prompt": "Count: 1, 2, 3, 4,"}).json["tokens"]
    for same in (ids, [ids], ["Count: 1, 2, 3, 4,"]):
        assert completion(server, same).json["choices"] == body["choices"]


def test_completions_stream(server: ServerProcess) -> None:
    whole = completion(server, "Count: 1, 2, 3, 4,").json
    options = {"include_usage": True}
    events = completion(server, "Count: 1, 2, 3, 4,", stream=True, stream_options=options).events
    assert all(list(event) == [*CHUNK, "usage"] for event in events)
    assert (
        "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["choices"][0]["text"]
    )
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    last = {name: value for name, value in whole["usage"].items() if value is not None}
    assert (events[-1]["choices"], events[-1]["usage"]) == ([], last)


def test_completion_logprobs(server: ServerProcess) -> None:
    choice = completion(server, "Count: 1, 2,", logprobs=2, max_tokens=5).json["choices"][0]
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [len(values) for values in logprobs.values()] == [5] * 4
    for chosen, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[chosen] == value == max(top.values())


@pytest.mark.parametrize("stream", [False, True])
def test_abort_request(server: ServerProcess, stream: bool) -> None:
    connection = server.connect()
    server.send_chat(connection, "abort", rid="abc-123", max_tokens=3000, stream=stream)
    server.until(lambda: server.load()["num_running_reqs"] == 1)
    assert server.post("/abort_request", {"rid": ""}).status == 200
    assert server.post("/abort_request", {"rid": "xyz"}).status == 200
    assert server.load()["num_running_reqs"] == 1
    assert server.post("/abort_request", {"rid": "abc"}).body == b""
    body = connection.getresponse().read()
    connection.close()
    if stream:
        assert body.endswith(b"data: [DONE]\n\n")
        last = json.loads(body.split(b"\n\n")[-3].removeprefix(b"data: "))
    else:
        last = json.loads(body)
        assert last["usage"]["completion_tokens"] < 3000
    assert last["choices"][0]["finish_reason"] == "abort"
    server.until(lambda: server.load()["num_used_tokens"] == 0)


def test_abort_all(server: ServerProcess) -> None:
    connections = [server.connect() for _ in range(3)]
    for connection in connections:
        server.send_chat(connection, "abort", max_tokens=3000)
    server.until(lambda: server.load()["num_running_reqs"] == 3)
    server.post("/abort_request", {"abort_all": True})
    for connection in connections:
        body = json.loads(connection.getresponse().read())
        assert body["choices"][0]["finish_reason"] == "abort"
        connection.close()
