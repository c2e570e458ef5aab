"""Request bodies as bytes: read up to a limit, forwarded as they came."""

import asyncio
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from longleaf.gateway.api.errors import body_stalled, body_too_large

_COPIED_BYTES = 64 * 1024


async def read_body(scope: Scope, receive: Receive, limit: int, silence: float) -> bytes:
    """The body, of at most ``limit`` bytes; stops reading (413) as soon as it is more.

    408 after ``silence`` seconds without a byte: nobody may hold up a drain by sending nothing.
    """
    declared = next((v for name, v in scope["headers"] if name == b"content-length"), b"")
    if declared.isdigit() and int(declared) > limit:
        raise body_too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(silence):
                message = await receive()
        except TimeoutError:
            raise body_stalled(silence) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise body_too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def with_rid(text: bytes, rid: str, more: bytes = b"") -> Sequence[bytes | memoryview]:
    """A JSON object's ``text`` with ``"rid": rid`` added, in parts that copy no long one.

    ``more``: further fields, each after a comma.

    Every other byte stays as the client sent it. A field of the client's own that is added loses:
    of two fields of one name JSON readers take the last.
    """
    end = len(text)
    while text[end - 1 : end].isspace():
        end -= 1
    tail = more + b',"rid":"' + rid.encode() + b'"}'
    if end <= _COPIED_BYTES:
        return (text[: end - 1] + tail,)
    return memoryview(text)[: end - 1], tail
