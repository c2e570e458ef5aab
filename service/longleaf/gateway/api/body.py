"""Reading request bodies: bounded, parsed once, forwarded as they came."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from longleaf.gateway.api.errors import body_stalled, body_too_large, invalid_request
from longleaf.gateway.api.schemas import GenerationRequest


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A valid request body: its JSON text and what it says."""

    text: bytes
    fields: dict[str, Any]

    def with_rid(self, rid: str) -> bytes:
        """The text with ``"rid": rid`` added and every other byte as the client sent it."""
        if "rid" in self.fields:
            return json.dumps({**self.fields, "rid": rid}).encode()
        return self.text.rstrip()[:-1] + b',"rid":"' + rid.encode() + b'"}'


async def read_body(request: Request, limit: int, silence: float) -> bytes:
    """The body, of at most ``limit`` bytes; stops reading (413) as soon as it is more.

    408 after ``silence`` seconds without a byte: nobody may hold up a drain by sending nothing.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise body_too_large(limit)
    receive: Receive = request.receive
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
            return b"".join(chunks)


def parse_body(text: bytes, schema: type[GenerationRequest]) -> ParsedBody:
    """Parse and check a body; 400 names the field that is wrong."""
    try:
        fields = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise invalid_request(f"The body is not valid JSON: {error}.", None) from None
    if not isinstance(fields, dict):
        raise invalid_request("The body must be a JSON object.", None)
    try:
        schema.model_validate(fields)
    except ValidationError as error:
        raise _wrong_field(error) from None
    return ParsedBody(text, fields)


def _wrong_field(error: ValidationError) -> Exception:
    """A 400 for the first wrong field. Never quotes the value: it may be a prompt."""
    first = error.errors(include_input=False, include_url=False)[0]
    location = [part for part in first["loc"] if not _names_a_type(part)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    path = path.removeprefix(".")
    message = first["msg"]
    if first["type"] == "missing":
        return invalid_request(f"Missing required parameter: {path!r}.", path)
    return invalid_request(f"Invalid value for {path!r}: {message}.", path)


def _names_a_type(part: int | str) -> bool:
    """Whether a part of pydantic's location is a member of a union, not a field."""
    return isinstance(part, str) and (part in {"str", "int"} or "[" in part)
