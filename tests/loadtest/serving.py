"""An HTTP server that answers every POST with given bytes at given times."""

import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from longleaf_load.records import Record
from longleaf_load.stream import Client

Piece = tuple[float, bytes]
"""Seconds after the piece before, and what is sent then."""
DONE = b"data: [DONE]\n\n"


def head(status: int = 200, **headers: str) -> bytes:
    """A status line and headers; the body ends with the connection."""
    lines = [f"HTTP/1.1 {status} X", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode()


def event(text: str) -> bytes:
    """One event with some of the answer's text."""
    return b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode()


@contextmanager
def served(pieces: Sequence[Piece]) -> Iterator[str]:
    """The URL of a server that answers with ``pieces``, as long as its client stays."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            while (line := self.rfile.readline()) not in {b"\r\n", b""}:
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.rfile.read(length)
            with suppress(OSError):
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for seconds, data in pieces:
                    time.sleep(seconds)
                    self.wfile.write(data)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def asked(pieces: Sequence[Piece], timeout: float = 30.0, leave_after: int | None = None) -> Record:
    """What a client records of one request that is answered with ``pieces``."""
    record = blank()
    with served(pieces) as url:
        Client(url, "chat", timeout).ask({"messages": []}, record, leave_after)
    return record


def blank(**values: Any) -> Record:
    """A record of a request that was just sent."""
    fields: Mapping[str, Any] = {
        "arrival": 0, "phase": 0, "turn": 1, "attempt": 1, "text": "code", "prompt_tokens": 100,
        "max_tokens": 9, "document": None, "sent": 0.0, "late": 0.0,
    }  # fmt: skip
    return Record(**{**fields, **values})
