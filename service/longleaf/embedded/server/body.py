"""Reading a request body: size limit, JSON, validation, in SGLang's words."""

import json
import re
from typing import Any, TypeVar

import anyio.to_thread
from fastapi import Request
from pydantic import BaseModel, ValidationError

from longleaf.embedded.server.errors import ApiError

Body = TypeVar("Body", bound=BaseModel)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_INLINE_BYTES = 256 * 1024
_SHOWN_INPUT = 200
_DISCARD_BYTES = 256 << 20
"""What is read of a body that is too long, so that its sender gets to see the answer."""


async def read_body(request: Request, model: type[Body], limit: int) -> Body:
    """Parse the body of ``request`` as ``model``. ``ApiError`` 413 above ``limit`` bytes, 400 for
    anything malformed.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise _invalid(
            [
                {
                    "type": "value_error",
                    "loc": ("header", "content-type"),
                    "msg": "Unsupported Media Type: Only 'application/json' is allowed",
                }
            ]
        )
    raw = await _read_limited(request, limit)
    if len(raw) > _INLINE_BYTES:  # long enough to hold up other streams
        return await anyio.to_thread.run_sync(_parse, raw, model)
    return _parse(raw, model)


async def _read_limited(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _DISCARD_BYTES:
            break
        if size <= limit:
            chunks.append(chunk)
    if size > limit:
        raise ApiError(
            f"The request body is larger than the limit of {limit} bytes (--max-body-bytes).",
            413,
            "RequestEntityTooLarge",
        )
    return b"".join(chunks)


def _parse(raw: bytes, model: type[Body]) -> Body:
    try:
        values = json.loads(raw)
        if _SURROGATE.search(raw):  # half a character is no text: it could not be sent back
            json.dumps(values, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _invalid(
            [
                {
                    "type": "json_invalid",
                    "loc": ("body", error.pos),
                    "msg": "JSON decode error",
                    "input": {},
                    "ctx": {"error": error.msg},
                }
            ]
        ) from error
    except (ValueError, RecursionError) as error:
        raise _invalid(
            [{"type": "json_invalid", "loc": ("body", 0), "msg": f"JSON decode error: {error}"}]
        ) from error
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _invalid(
            [
                {
                    "type": detail["type"],
                    "loc": ("body", *detail["loc"]),
                    "msg": detail["msg"],
                    "input": _shown(detail["input"]),
                }
                for detail in error.errors(include_url=False, include_context=False)
            ]
        ) from error


def _shown(value: Any) -> Any:
    text = repr(value)
    return value if len(text) <= _SHOWN_INPUT else text[:_SHOWN_INPUT] + "…"


def _invalid(details: list[dict[str, Any]]) -> ApiError:
    count = len(details)
    lines = "\n".join(f"  {detail}" for detail in details[:10])
    head = f"{count} validation error{'s' if count != 1 else ''}:"
    return ApiError(f"{head}\n{lines}", 400, "Bad Request")
