"""HTTP connections of which all that comes must come before one deadline.

A socket's own timeout starts anew with every byte: a server that sends a comment now and then
would hold its client for ever.
"""

import http.client
import io
import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


def connect(
    host: str, port: int | None, secure: bool, seconds: float
) -> http.client.HTTPConnection:
    """Connect; ``TimeoutError`` from whatever is done with it ``seconds`` from now."""
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    deadline = time.monotonic() + seconds
    connection = kind(host, port, timeout=seconds)
    connection.connect()
    connection.sock = _Socket(connection.sock, deadline)
    return connection


class _Socket:
    """What ``http.client`` uses of a socket."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def sendall(self, data: Any) -> None:
        """Send all of ``data``."""
        self._sock.settimeout(_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """What is received; it outlives ``close``, as a socket's own does."""
        return io.BufferedReader(_Received(self._sock, self._deadline))

    def shutdown(self, how: int) -> None:
        """End the connection, whoever still reads from it."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """Close it once its files are."""
        self._sock.close()


class _Received(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._file = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
