"""Bytes of a client into heads and bodies, by httptools' parser."""

from dataclasses import dataclass
from typing import NoReturn, Protocol

import httptools

from longleaf.gateway.api import errors

_UPGRADE = frozenset({b"upgrade", b"http2-settings"})
"""Headers of a wish to switch protocols, and their names in ``Connection``."""
_FRAMING = frozenset({b"host", b"expect", b"transfer-encoding"})
"""Headers that decide how a request is read."""


@dataclass(slots=True)
class RequestHead:
    """A request's head; header names in lower case."""

    method: str
    path: bytes
    query: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool
    """Whether the client wants to go on after the answer."""
    expects: bool
    """Whether the client waits for a 100 before it sends its body."""


class Requests(Protocol):
    """Gets what a ``RequestReader`` reads, in order."""

    def head_begins(self) -> None:
        """A request's first bytes are there."""
        ...

    def head_ends(self, head: RequestHead) -> None:
        """A request's head is there."""
        ...

    def body_comes(self, data: bytes) -> None:
        """A part of its body is there."""
        ...

    def body_ends(self) -> None:
        """All of it is there."""
        ...


class RequestReader:
    """``feed`` it what a connection brings. A wish to switch protocols is declined: the request is
    read as if it had none, and those after it too.
    """

    def __init__(self, requests: Requests, max_head_bytes: int) -> None:
        self.in_head = False
        """Whether a head has begun and not ended."""
        self._requests = requests
        self._max_head_bytes = max_head_bytes
        self._error: errors.ApiError | None = None
        self._declined = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = self._hosts = 0
        self._expects = False
        self._told = False
        """Whether the parser has told anything of what it was fed last."""
        self._untold_bytes = 0
        """Fed since then: it holds part of a header until its end, and tells of it then."""
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Read on. ``ApiError`` for what is no HTTP, or too long: nothing can be read after it."""
        self._told = False
        left: bytes | memoryview = data
        try:
            while left:
                try:
                    self._parser.feed_data(left)
                except httptools.HttpParserUpgrade as upgrade:
                    left = memoryview(left)[upgrade.args[0] :]
                    self._read_declined()
                else:
                    break
        except httptools.HttpParserError:
            raise self._error or errors.invalid_request(
                "The request is not valid HTTP/1.1.", None
            ) from None
        self._untold_bytes = 0 if self._told else self._untold_bytes + len(data)
        if self._untold_bytes > self._max_head_bytes:
            if self.in_head:
                raise errors.head_too_large(self._max_head_bytes)
            raise errors.invalid_request(
                f"What frames the body is longer than {self._max_head_bytes} bytes.", None
            )

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._url = b""
        self._headers = []
        self._head_bytes = self._hosts = 0
        self._expects = False
        self._told = self.in_head = True
        self._requests.head_begins()

    def on_url(self, url: bytes) -> None:
        """Called by the parser, with a part."""
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser. A header after the body (a trailer) is none of the request's: what
        was decided by the head stays.
        """
        self._count(len(name) + len(value) + 4)
        if not self.in_head:
            return
        name = name.lower()
        if name in _FRAMING:
            self._take_framing(name, value)
        self._headers.append((name, value))

    def _take_framing(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
        elif name == b"expect":
            self._expects = value.lower() == b"100-continue"
        elif value.lower() != b"chunked":
            self._reject("The only Transfer-Encoding that is taken is chunked.")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        parser = self._parser
        url = httptools.parse_url(self._url)
        method = parser.get_method()
        if method == b"CONNECT":
            self._reject("This is no proxy: it takes no CONNECT.")
        if parser.should_upgrade():
            self._declined = True  # the parser now takes the body for another protocol's
            return
        self.in_head = False
        version = parser.get_http_version()
        if self._hosts > 1:
            self._reject("The request has more than one Host header.")
        if version == "1.1" and not self._hosts:
            self._reject("The request has no Host header.")
        keep_alive = version != "1.0" and parser.should_keep_alive()
        path = url.path or b"/"
        head = RequestHead(
            method.decode("ascii"),
            path,
            url.query or b"",
            version,
            self._headers,
            keep_alive,
            self._expects,
        )
        self._requests.head_ends(head)

    def on_chunk_header(self) -> None:
        """Called by the parser."""
        self._told = True

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._told = True
        self._requests.body_comes(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if not self._declined:
            self._requests.body_ends()

    def _read_declined(self) -> None:
        """Read the latest head again, by another parser, without the wish."""
        method, version = self._parser.get_method(), self._parser.get_http_version()
        lines = [b"%b %b HTTP/%b\r\n" % (method, self._url, version.encode())]
        for name, value in self._headers:
            if name == b"connection":
                said = [word.strip() for word in value.split(b",")]
                value = b", ".join(word for word in said if word.lower() not in _UPGRADE)
            if name not in _UPGRADE and value:
                lines.append(b"%b: %b\r\n" % (name, value))
        self._declined = False
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"".join((*lines, b"\r\n")))

    def _reject(self, message: str) -> NoReturn:
        self._error = errors.invalid_request(message, None)
        raise self._error

    def _count(self, size: int) -> None:
        self._told = True
        self._head_bytes += size
        if self._head_bytes > self._max_head_bytes:
            self._error = errors.head_too_large(self._max_head_bytes)
            raise self._error
