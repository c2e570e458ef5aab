"""Asks ``/livez`` of a port again and again, from a process that does nothing else.

    python -m ops.bench.gateway_livez PORT

Prints the milliseconds of each answer, one a line, until its standard input ends.
"""

import select
import socket
import sys
import time

_REQUEST = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
_PAUSE_SECONDS = 0.02
_LIMIT_SECONDS = 30.0


def ask(port: int) -> float:
    """Milliseconds until the whole answer is there, on a fresh connection."""
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), _LIMIT_SECONDS) as connection:
        connection.sendall(_REQUEST)
        answer = b""
        while part := connection.recv(4096):
            answer += part
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise OSError(f"/livez answered {answer[:40]!r}")
    return (time.monotonic() - begun) * 1e3


def main(port: int) -> None:
    """Ask until standard input ends."""
    while not select.select([sys.stdin], [], [], _PAUSE_SECONDS)[0]:
        print(f"{ask(port):.3f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
