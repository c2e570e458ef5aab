"""What a kubelet would do: processes at pods' addresses, their logs, and the pods' states."""

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trustme


@contextmanager
def addresses(*found: str) -> Iterator[None]:
    """Addresses of the loopback of this network namespace."""
    for address in found:
        subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
    try:
        yield
    finally:
        for address in found:
            subprocess.run(["ip", "address", "del", f"{address}/32", "dev", "lo"], check=True)


@contextmanager
def running(
    *arguments: str, log: Path | None = None, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A ``longleaf`` process; ended by SIGTERM."""
    with ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("ab"))
        process = subprocess.Popen(
            [sys.executable, "-m", "longleaf", *arguments],
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def get(url: str) -> str | None:
    """Body of a 200, or None."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def request(url: str, **more: Any) -> urllib.request.Request:
    """A chat completion."""
    body = {
        "model": "longleaf-tiny",
        "messages": [{"role": "user", "content": "Count from 1 to 5."}],
        "max_tokens": 16,
        "temperature": 0,
        **more,
    }
    return urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )


def chat(url: str, **more: Any) -> str:
    """What is answered."""
    with urllib.request.urlopen(request(url, **more), timeout=60) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


class Stream(threading.Thread):
    """One long answer, read as it comes. Its replica is known once ``started`` is set."""

    def __init__(self, url: str, tokens: int, **more: Any) -> None:
        super().__init__(daemon=True)
        self._request = request(
            url,
            max_tokens=tokens,
            ignore_eos=True,
            stream=True,
            stream_options={"include_usage": True},
            **more,
        )
        self.started = threading.Event()
        self.ended = threading.Event()
        self.failure: Exception | None = None
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        """Read to the end."""
        try:
            with urllib.request.urlopen(self._request, timeout=60) as answer:
                for line in answer:
                    if line.strip():
                        self.lines.append(line.decode().strip())
                        self.started.set()
        except Exception as error:
            self.failure = error
        finally:
            self.ended.set()
            self.started.set()

    def tokens(self) -> int:
        """Tokens of the whole answer; it has come to its end."""
        assert self.failure is None, self.failure
        assert self.lines[-1] == "data: [DONE]"
        usage: Mapping[str, int] = json.loads(self.lines[-2].removeprefix("data: "))["usage"]
        return usage["completion_tokens"]


@contextmanager
def kubelet(address: str, logs: Mapping[str, Path]) -> Iterator[int]:
    """Serves containers' logs, by POD/CONTAINER, as a kubelet does; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, kind, _, *names = urlsplit(self.path).path.split("/")
            path = logs.get("/".join(names)) if kind == "containerLogs" else None
            text = path.read_bytes() if path else b""
            self.send_response(200 if path else 404)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *words: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer((address, 0), Handler)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert(address).configure_cert(tls)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
