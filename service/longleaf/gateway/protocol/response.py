"""The head of an answer: its lines, and how its body is framed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from longleaf.gateway.api.errors import ApiError

_LINES: Mapping[int, bytes] = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}
_BODILESS = frozenset({204, 304})

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(slots=True)
class ResponseHead:
    """An answer's head as it is sent."""

    lines: list[bytes]
    chunked: bool
    events: bool
    """Whether the body is a stream of server-sent events."""
    keep_alive: bool
    """Whether the connection can go on after it."""


def response_head(status: int, headers: Headers, version: str, keep_alive: bool) -> ResponseHead:
    """The head of an answer to a client that speaks HTTP ``version``."""
    lines = [_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    sized = status in _BODILESS
    closes = events = False
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
        if name == b"content-length":
            sized = True
        elif name == b"content-type":
            events = value.startswith(b"text/event-stream")
        elif name == b"connection":
            closes = b"close" in value.lower()
    keep_alive = keep_alive and not closes
    if not keep_alive and not closes:
        lines.append(b"connection: close\r\n")
    chunked = not sized and version != "1.0"
    if chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif not sized:
        keep_alive = False
    lines.append(b"\r\n")
    return ResponseHead(lines, chunked, events, keep_alive)


def refusal(error: ApiError, headers: Headers) -> bytes:
    """The whole answer to what is no request; the connection ends with it."""
    body = error.body()
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    head = response_head(error.status, (*headers, *own), "1.1", keep_alive=False)
    return b"".join((*head.lines, body))
