"""Request bodies as bytes: read up to a limit, forwarded as they came."""

import asyncio
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from longleaf.gateway.api import client
from longleaf.gateway.api.errors import body_stalled, body_too_large, body_too_slow
from longleaf.gateway.api.reception import FREE_BYTES, Place
from longleaf.gateway.config import GatewayConfig

_COPIED_BYTES = 64 * 1024
_SILENT = 0.9
"""A body that stalls at its beginning is too slow at the same moment: it is told that it stalls
where nothing came for so much of the time that it may be silent."""


async def read_body(scope: Scope, receive: Receive, config: GatewayConfig, place: Place) -> bytes:
    """The body; stops reading (413) as soon as it is too large.

    408 for one that stalls or comes too slowly: nobody may hold up a drain by sending little.
    ``ReceptionFullError`` for a long one that gets no ``place``.
    """
    limit = config.max_body_bytes
    here: client.Client = scope[client.KEY]
    whole = here.whole_body()
    if whole is not None:
        if len(whole) > limit:
            raise body_too_large(limit)
        if len(whole) > FREE_BYTES:
            await place.take(len(whole))
        return whole
    declared = b"".join([value for name, value in scope["headers"] if name == b"content-length"])
    if declared.isdigit() and int(declared) > limit:
        raise body_too_large(limit)
    if declared.isdigit() and int(declared) > FREE_BYTES:
        await place.take(int(declared))
    chunks: list[bytes] = []
    size = 0
    silence, rate = config.body_timeout, config.min_body_rate
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        since = loop.time()
        due = min(since, began + size / rate) + silence
        try:
            async with asyncio.timeout_at(due):
                message = await receive()
        except TimeoutError:
            if due - since > _SILENT * silence:
                raise body_stalled(silence) from None
            raise body_too_slow(rate) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise body_too_large(limit)
        if size > FREE_BYTES and not place.taken:  # nobody knows how long it gets
            asked = loop.time()
            await place.take(limit)
            began += loop.time() - asked
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
