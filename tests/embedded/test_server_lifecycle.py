"""Start, bad options, body limit, and a SIGTERM that lets running answers end."""

import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import MODELS, ServerProcess, StartServer


def test_sigterm_lets_running_answers_end(start_server: StartServer) -> None:
    server = start_server()
    connection, answer = server.open_stream("Count to 900", max_tokens=700)
    answer.readline()
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: server.get("/health").status == 503)
    reply = server.chat()
    assert (reply.status, reply.json["message"]) == (503, "The server is shutting down.")
    body = answer.read()
    assert b'"finish_reason":"length"' in body
    assert body.endswith(b"data: [DONE]\n\n")
    connection.close()
    assert server.stop() == 0


def test_a_drain_is_bounded(start_server: StartServer) -> None:
    server = start_server("--drain-seconds", "0.2")
    connection, answer = server.open_stream("Count to 9000", max_tokens=4000)
    answer.readline()
    server.process.send_signal(signal.SIGTERM)
    body = answer.read()
    assert b'"finish_reason":"abort"' in body
    assert body.endswith(b"data: [DONE]\n\n")
    connection.close()
    server.process.wait(60)
    assert server.process.returncode == 0


def test_a_client_that_leaves_while_it_sends_its_body_is_no_error(
    start_server: StartServer,
) -> None:
    server = start_server()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: 99\r\nexpect: 100-continue\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")  # the body is being waited for
        client.sendall(b"{")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.communicate(timeout=60)[1] == ""


def test_an_idle_server_ends_at_once(start_server: StartServer) -> None:
    server = start_server("--speculative-algorithm", "none")
    assert server.get("/server_info").json["speculative_algorithm"] is None
    body = server.chat(return_spec_tokens_details=True).json
    assert body["usage"]["spec_tokens_details"]["commit_len"] == 1.0
    server.process.send_signal(signal.SIGINT)
    server.process.wait(30)
    assert server.process.returncode == 0


def test_body_limit(start_server: StartServer) -> None:
    server = start_server("--max-body-bytes", "2000")
    assert server.chat("x" * 1000).status == 200
    reply = server.chat("x" * 3000)
    assert (reply.status, reply.json["code"]) == (413, 413)
    assert "limit of 2000 bytes" in reply.json["message"]
    # Without a declared length the limit holds too.
    with contextlib.closing(server.connect()) as connection:
        chunks = (b"x" * 500 for _ in range(10))
        connection.request(
            "POST", "/v1/chat/completions", chunks, {"Content-Type": "application/json"}
        )
        assert connection.getresponse().status == 413
    # A body far above the limit is read to its end, so that the answer arrives.
    assert server.chat("x" * 30_000_000).status == 413
    assert server.get("/health").status == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model-path", "/nowhere"], "/nowhere"),
        (["--speculative-draft-model-path", "/nowhere"], "/nowhere"),
        (["--context-length", "999999"], "context length must be at most the model's"),
        (["--max-total-tokens", "3"], "max_total_tokens must be at least 16, got 3"),
        (["--speculative-budget", "0"], "budget must be at least 1"),
        (["--speculative-block", "99"], "block must be at most the drafter's 8, got 99"),
        (["--max-running-requests", "0"], "max_running_requests must be at least 1, got 0"),
        (["--port", "70000"], "70000"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_options(options: list[str], message: str) -> None:
    models = ["--model-path", str(MODELS / "tiny-target")]
    draft = ["--speculative-draft-model-path", str(MODELS / "tiny-drafter")]
    run = subprocess.run(
        [sys.executable, "-m", "longleaf", "embedded", *models, *draft, *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode in (1, 2)
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_a_taken_port(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server()
    second = ServerProcess("--port", str(server.port))
    _, errors = second.process.communicate(timeout=60)
    assert second.process.returncode not in (0, None)
    assert "address already in use" in errors
