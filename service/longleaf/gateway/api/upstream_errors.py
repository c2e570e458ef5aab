"""Errors that replicas report, in the gateway's envelope and with the right status.

SGLang's errors are flat where an answer is JSON and nested where it is a stream; a stream's first
event may be an error although its status is 200.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from longleaf.gateway.api.errors import (
    ApiError,
    context_length_exceeded,
    internal_error,
    invalid_request,
    rate_limit_exceeded,
    service_unavailable,
)
from longleaf.gateway.replicas.drain_rate import UNKNOWN_SECONDS
from longleaf.gateway.replicas.replica import Replica

_TOO_LONG = re.compile(
    r"longer than the model's context length"
    r"|maximum context length"
    r"|exceeds the maximum allowed length"
    r"|max_(completion_)?tokens is too large"
)
_QUEUE_FULL = re.compile(r"queue is full|queue full|higher priority")
_LOCATION = re.compile(r"""'loc': \('body', ('\w+'[^)]*)\), 'msg': (?:'([^']*)'|"([^"]*)")""")
_STEP = re.compile(r"'(\w+)'|(\d+)")
_FIRST_WORD = re.compile(r"\w+")


def from_replica(
    error: Mapping[str, Any], status: int, request: Collection[str], replica: Replica
) -> ApiError:
    """The client's error for ``error``, which ``replica`` gave with HTTP ``status``.

    ``request``: names of the fields that the body had.

    ``status`` decides unless it is 200: then the error's own ``code`` does.
    """
    message = _text(error)
    code = error.get("code")
    if status < 400:
        status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    if status == 400 and _TOO_LONG.search(message):
        return context_length_exceeded(message, "messages" if "messages" in request else "prompt")
    if status == 429 or (status == 503 and _QUEUE_FULL.search(message)):
        seconds = replica.budget.seconds_until_turn(replica.waiting)
        return rate_limit_exceeded(UNKNOWN_SECONDS if seconds is None else seconds)
    if status in {502, 503, 504}:
        return service_unavailable(f"The replica cannot serve now: {message}", 5.0)
    if status in {401, 403}:
        return internal_error(502, "The replica refused the gateway's own key.")
    if status < 500:
        clean, param = _named_parameter(message, error, request)
        refused = invalid_request(clean, param)
        refused.status = status
        return refused
    return internal_error(status if status < 600 else 500, message)


def worth_another_replica(error: ApiError) -> bool:
    """Whether another replica might do what this one could not: it is full, or going away."""
    return error.status in {429, 503}


def _text(error: Mapping[str, Any]) -> str:
    message = error.get("message", error.get("detail"))
    return message if isinstance(message, str) and message else "The replica reported an error."


def _named_parameter(
    message: str, error: Mapping[str, Any], request: Collection[str]
) -> tuple[str, str | None]:
    """A clean message and the parameter that it is about, as far as the replica tells.

    SGLang's validation errors carry source paths and its code, which are nobody's business.
    """
    located = _LOCATION.search(message)
    if located is not None:
        name = "".join(
            f".{field}" if field else f"[{index}]"
            for field, index in _STEP.findall(located.group(1))
        ).lstrip(".")
        return f"{name}: {located.group(2) or located.group(3)}", name
    clean = message.split("\n\n  File ", 1)[0]
    param = error.get("param")
    if isinstance(param, str):
        return clean, param
    first = _FIRST_WORD.match(clean)
    word = first.group(0) if first else ""
    for candidate in (word, word.lower()):
        if candidate in request:
            return clean, candidate
    return clean, None
