"""``longleaf serve`` as a user runs it: start, paste the printed line, Ctrl-C."""

import json
import os
import re
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import longleaf
from longleaf.serve.command import model_name, model_path
from tests.gateway.engine import running_engine

START_SECONDS = 120.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(item.getsockname()[1]) for item in sockets]
    for item in sockets:
        item.close()
    return ports


@dataclass
class Serve:
    process: subprocess.Popen[str]
    port: int
    metrics_port: int
    engine_port: int
    lines: list[str] = field(default_factory=list)

    def wait_line(self, pattern: str) -> str:
        """Wait until a line of standard output matches; fails if the process ends first."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if not selector.select(timeout=1.0):
                    continue
                line = self.process.stdout.readline()
                assert line, f"ended with {self.process.wait()} after {self.lines}"
                self.lines.append(line.rstrip("\n"))
                if re.search(pattern, line):
                    return line
        raise AssertionError(f"no line matches {pattern!r} in {self.lines}")

    def interrupt(self) -> int:
        """What Ctrl-C at the terminal sends."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=90)


@contextmanager
def running(*arguments: str) -> Iterator[Serve]:
    port, metrics_port, engine_port = free_ports(3)
    options = {"--port": port, "--metrics-port": metrics_port, "--engine-port": engine_port}
    command = [sys.executable, "-m", "longleaf", "serve"]
    for name, value in options.items():
        command += [name, str(value)]
    with subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            yield Serve(process, port, metrics_port, engine_port)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(timeout=90)
                except subprocess.TimeoutExpired:
                    process.kill()


def is_listening(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def part(parent: int, name: str) -> int:
    """Process id of the child of ``parent`` that runs ``longleaf <name>``."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end while we look
            parent_of = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent_of) == parent and name in (folder / "cmdline").read_text().split("\0"):
                return int(folder.name)
    raise AssertionError(f"no child of {parent} runs longleaf {name}")


@pytest.mark.skipif(shutil.which("curl") is None, reason="pastes the printed line: needs curl")
def test_the_printed_line_streams_an_answer_with_its_commit_len() -> None:
    with running() as serve:
        line = serve.wait_line("^ready ")
        pasted = shlex.split(line[line.index("curl ") :])
        answer = subprocess.run(pasted, capture_output=True, text=True, timeout=120, check=True)
        events = [part for part in answer.stdout.split("\n\n") if part.startswith("data: ")]
        assert events[-1].strip() == "data: [DONE]"
        chunks = [json.loads(part.removeprefix("data: ")) for part in events[:-1]]
        text = "".join(
            choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
        )
        assert text.startswith("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12")
        usage = chunks[-1]["usage"]
        spec = usage["spec_tokens_details"]
        assert spec["commit_len"] * spec["steps"] == pytest.approx(
            usage["completion_tokens"] - 1, abs=0.01 * spec["steps"]
        )
        assert spec["commit_len"] > 4.0
        metrics_url = f"http://127.0.0.1:{serve.metrics_port}/metrics"
        with urllib.request.urlopen(metrics_url, timeout=10) as metrics:
            assert "longleaf_gateway_" in metrics.read().decode()
        assert serve.interrupt() == 0
        ports = (serve.port, serve.metrics_port, serve.engine_port)
        assert [port for port in ports if is_listening(port)] == []


def interrupted_stream(serve: Serve, max_tokens: int) -> str:
    """A stream's body, whose first line has come when Ctrl-C is pressed."""
    body = {
        "model": "longleaf-tiny",
        "messages": [{"role": "user", "content": "Please count from 1 to 200."}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{serve.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        first: bytes = answer.readline()
        serve.process.send_signal(signal.SIGINT)
        rest: bytes = answer.read()
    assert first.startswith(b"data: ")
    return (first + rest).decode()


def test_ctrl_c_lets_a_running_stream_finish() -> None:
    with running() as serve:
        serve.wait_line("^ready ")
        body = interrupted_stream(serve, 600)
        assert '"completion_tokens":600' in body
        assert body.endswith("data: [DONE]\n\n")
        assert serve.process.wait(timeout=90) == 0


def test_an_answer_longer_than_the_drain_ends_with_an_error_that_says_so() -> None:
    with running("--drain-seconds", "0.3") as serve:
        serve.wait_line("^ready ")
        last = interrupted_stream(serve, 15_000).rstrip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["message"] == "The gateway is shutting down."
        assert serve.process.wait(timeout=90) == 0


def test_keys_routing_and_further_replicas_reach_the_gateway(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret requests_per_minute=60\n")
    options = ("--api-key-file", str(keys), "--routing", "round_robin")
    with (
        running_engine("--served-model-name", "second") as second,
        running(*options, "--replica", second.url, "--", "--served-model-name=first") as serve,
    ):
        line = serve.wait_line("^ready ")
        assert "-H 'Authorization: Bearer KEY' " in line
        assert '"model": "first"' in line
        gateway = f"http://127.0.0.1:{serve.port}"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(gateway + "/v1/models", timeout=10)
        asked = urllib.request.Request(
            gateway + "/v1/models", headers={"authorization": "Bearer secret"}
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            served = {card["id"] for card in json.loads(answer.read())["data"]}
        assert served == {"first", "second"}  # as soon as it says that it is ready
        command = Path(f"/proc/{part(serve.process.pid, 'gateway')}/cmdline").read_text()
        assert "--routing\0round_robin\0" in command
        assert serve.interrupt() == 0


def test_a_replica_that_is_not_there_is_told() -> None:
    (port,) = free_ports(1)
    ports = [str(one) for one in free_ports(3)]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "longleaf", "serve", "--start-seconds", "15"),
            *("--port", ports[0], "--metrics-port", ports[1], "--engine-port", ports[2]),
            *("--replica", f"http://127.0.0.1:{port}"),
        ],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert ended.returncode == 1
    assert re.search(r"^Error: [01] of 2 replicas ready after 15 s", ended.stderr, re.MULTILINE)
    assert "ready after" not in ended.stdout


def test_a_part_that_dies_stops_the_other_and_is_reported() -> None:
    with running() as serve:
        serve.wait_line("^ready ")
        os.kill(part(serve.process.pid, "embedded"), signal.SIGKILL)
        assert serve.process.wait(timeout=90) == 1
        ports = (serve.port, serve.metrics_port, serve.engine_port)
        assert [port for port in ports if is_listening(port)] == []


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-m", "longleaf", "serve", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert f"--port: cannot listen on 127.0.0.1:{port}" in ended.stderr


def test_a_wrong_engine_option_ends_with_its_message() -> None:
    port, metrics_port, engine_port = free_ports(3)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "longleaf", "serve", "--port", str(port)),
            *("--metrics-port", str(metrics_port), "--engine-port", str(engine_port)),
            *("--", "--context-length", "99999999"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "context length must be at most the model's" in ended.stderr
    assert "the embedded engine ended with status" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("--model-path", "/m"), "/m"),
        (("--log-level", "debug", "--model-path=/m/n"), "/m/n"),
        ((), str(Path(longleaf.__file__).parent / "embedded/models/tiny-target")),
    ],
)
def test_gateway_counts_with_the_tokenizer_of_the_engines_model(
    arguments: tuple[str, ...], path: str
) -> None:
    assert model_path(arguments) == path


def test_gateway_knows_the_name_that_the_engine_serves() -> None:
    assert model_name(()) == "longleaf-tiny"
    assert model_name(("--served-model-name", "a", "--x", "--served-model-name=b")) == "b"
