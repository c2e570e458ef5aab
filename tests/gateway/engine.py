"""The real embedded engine as a child process."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_START_SECONDS = 120.0


class Engine:
    """A running engine."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        """An answer of the engine itself."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.loads(answer.read())

    @property
    def load(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        load = self.get("/v1/loads")["loads"][0]
        return load["num_running_reqs"], load["num_waiting_reqs"]

    @property
    def healthy(self) -> bool:
        """Whether ``/health`` answers 200."""
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=10):
                return True
        except OSError:
            return False


@contextmanager
def running_engine(*arguments: str) -> Iterator[Engine]:
    """An engine on a free port, once it is healthy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "longleaf", "embedded", "--port", str(port), *arguments]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        engine = Engine(process, port)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not engine.healthy:
                assert process.poll() is None, f"the engine ended with {process.returncode}"
                assert time.monotonic() < deadline, "the engine did not start"
                time.sleep(0.05)
            yield engine
        finally:
            process.kill()
