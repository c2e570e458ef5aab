"""Simulated replicas as a child process."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from longleaf.options import http_url

LIMIT = 60.0


@dataclass(frozen=True)
class Simulated:
    """Replicas that run."""

    process: "subprocess.Popen[bytes]"
    urls: tuple[str, ...]

    def get(self, path: str, replica: int = 0) -> tuple[dict[str, str], str]:
        with urllib.request.urlopen(self.urls[replica] + path, timeout=LIMIT) as answer:
            return dict(answer.headers), answer.read().decode()

    def object(self, path: str, replica: int = 0) -> Any:
        return json.loads(self.get(path, replica)[1])

    def open(self, replica: int = 0, path: str = "/v1/chat/completions", **body: Any) -> Any:
        fields = {
            "model": "longleaf-simulated",
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_spec_tokens_details": True,
            **body,
        }
        data, kind = json.dumps(fields).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(self.urls[replica] + path, data, kind)
        return urllib.request.urlopen(request, timeout=LIMIT)

    def refusal(self, **body: Any) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of an answer that is an error."""
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.open(**body)
        with refused.value as answer:
            return answer.code, dict(answer.headers), answer.read().decode()

    def ask(self, replica: int = 0, **body: Any) -> "Stream":
        """One streamed answer, read to its end."""
        sent = time.monotonic()
        times: list[float] = []
        chunks: list[dict[str, Any]] = []
        with self.open(replica, **body) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    times.append(time.monotonic() - sent)
                    chunks.append(json.loads(line[6:]))
        return Stream(dict(answer.headers), times, chunks)


@dataclass(frozen=True)
class Stream:
    headers: dict[str, str]
    times: list[float]
    chunks: list[dict[str, Any]]

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = self.chunks[-1]["usage"]
        return usage

    @property
    def text(self) -> str:
        deltas = [chunk["choices"][0]["delta"] for chunk in self.chunks if chunk.get("choices")]
        return "".join(delta.get("content") or "" for delta in deltas)


@contextmanager
def simulated(*arguments: str, replicas: int = 1, host: str = "127.0.0.1") -> Iterator[Simulated]:
    """``longleaf simulate``, once it answers."""
    base = _free_ports(replicas)
    command = [sys.executable, "-m", "longleaf", "simulate", "--port", str(base)]
    command += ["--host", host, "--replicas", str(replicas), *arguments]
    urls = tuple(http_url(host, base + number) for number in range(replicas))
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        running = Simulated(process, urls)
        try:
            deadline = time.monotonic() + LIMIT
            while not _healthy(running):
                assert process.poll() is None, f"it ended with {process.returncode}"
                assert time.monotonic() < deadline, "it did not start"
                time.sleep(0.05)
            yield running
        finally:
            process.kill()


def _healthy(running: Simulated) -> bool:
    try:
        running.get("/health")
    except OSError:
        return False
    return True


def _free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as first:
            base: int = first.getsockname()[1]
        if base + count > 65_535:
            continue
        try:
            for port in range(base, base + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return base
    raise AssertionError("no free ports")


@pytest.fixture(scope="session")
def pair() -> Iterator[Simulated]:
    """Two replicas, twenty times as fast as the recorded machine."""
    with simulated("--speed", "20", replicas=2) as running:
        yield running


@pytest.fixture
def run_simulated() -> Callable[..., Any]:
    return simulated
