"""A client that leaves, at whatever moment, frees what its request held."""

import http.client
import json

import pytest

from .conftest import ServerProcess, StartServer

PROMPT_TOKENS = 3600


@pytest.fixture(scope="module")
def slow(start_server: StartServer) -> ServerProcess:
    """Prefill in crumbs, so that a long prompt takes hundreds of steps."""
    return start_server("--chunked-prefill-size", "8")


def long_prompt(server: ServerProcess, first: int, **fields: object) -> http.client.HTTPConnection:
    connection = server.connect()
    prompt = [first] + [100 + i % 900 for i in range(PROMPT_TOKENS - 1)]
    body = json.dumps({"prompt": prompt, "max_tokens": 4, **fields})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(slow: ServerProcess, stream: bool) -> None:
    before = slow.load()["total_prefill_uncached_tokens"]
    connection = long_prompt(slow, 10 + stream, stream=stream)
    slow.until(lambda: slow.load()["total_prefill_uncached_tokens"] > before)
    connection.close()
    slow.until(lambda: slow.load()["num_running_reqs"] == 0)
    computed = slow.load()["total_prefill_uncached_tokens"] - before
    assert 0 < computed < PROMPT_TOKENS
    assert slow.load()["num_used_tokens"] == 0


def test_while_waiting(slow: ServerProcess) -> None:
    running = [slow.open_stream("x", max_tokens=3000)[0] for _ in range(4)]
    slow.until(lambda: slow.load()["num_running_reqs"] == 4)
    waiting = long_prompt(slow, 20)
    slow.until(lambda: slow.load()["num_waiting_reqs"] == 1)
    waiting.close()
    slow.until(lambda: slow.load()["num_waiting_reqs"] == 0)
    assert slow.load()["num_running_reqs"] == 4
    for connection in running:
        connection.close()
    slow.until(lambda: slow.load()["num_used_tokens"] == 0)


def test_after_the_first_token(slow: ServerProcess) -> None:
    connection, answer = slow.open_stream("Count to 9000", max_tokens=3000)
    for _ in range(6):
        answer.readline()
    connection.close()
    slow.until(lambda: slow.load()["num_running_reqs"] == 0)
    moments = slow.load()["decode_moments"]
    assert slow.load()["num_used_tokens"] == 0
    assert slow.load()["decode_moments"] == moments


def test_a_whole_answer_that_nobody_waits_for(slow: ServerProcess) -> None:
    connection = slow.connect()
    slow.send_chat(connection, "Count to 9000", max_tokens=3000)
    slow.until(lambda: slow.load()["num_running_reqs"] == 1)
    connection.close()
    slow.until(lambda: slow.load()["num_running_reqs"] == 0)


def test_streams_and_health_go_on_during_a_long_prefill(slow: ServerProcess) -> None:
    connection, answer = slow.open_stream("Count to 9000", max_tokens=3000)
    answer.readline()
    before = slow.load()["total_prefill_uncached_tokens"]
    other = long_prompt(slow, 30)
    slow.until(lambda: slow.load()["total_prefill_uncached_tokens"] > before)
    for _ in range(20):
        assert answer.readline()
        assert slow.get("/health").status == 200
    assert slow.load()["total_prefill_uncached_tokens"] - before < PROMPT_TOKENS
    connection.close()
    other.close()
    slow.until(lambda: slow.load()["num_used_tokens"] == 0)
