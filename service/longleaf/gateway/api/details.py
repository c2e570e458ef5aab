"""What the gateway adds to an answer on request: how it came about.

Asked for by the header ``x-longleaf-details: true``. A whole answer gets a field ``longleaf``, a
stream a last chunk without choices that has it, before ``[DONE]``.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from longleaf.gateway.request_log import RequestRecord

HEADER = b"x-longleaf-details"
SPEC_FIELD = b',"return_spec_tokens_details":true'
"""Asks the engine for its acceptance figures."""

_COMMON = ("id", "object", "created", "model", "system_fingerprint")
_DONE = b"data: [DONE]"
_LAST_PIECES = 4
LAST_BYTES = 64 * 1024
"""Of one piece: its end is enough."""
_FIGURES: Mapping[str, bytes] = {
    name: b'"%b":' % name.encode()
    for name in ("prompt_tokens", "completion_tokens", "spec_accept_length", "spec_verify_ct")
}
_NUMBER = re.compile(rb" ?(\d{1,9}(?:\.\d+)?)")


def wanted(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request asks for it."""
    asked = [value for name, value in headers if name == HEADER]
    return bool(asked) and any(value.lower() in {b"1", b"true"} for value in asked)


class Tail:
    """The last pieces of a stream: usage and acceptance figures stand there.

    Nothing of an answer is parsed while it runs.
    """

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque(maxlen=_LAST_PIECES)
        self.add = self._pieces.append
        """Take in one piece, of at most ``LAST_BYTES``: a client that reads nothing makes it stay.
        """

    def numbers(self) -> dict[str, float]:
        """What it tells, as ``numbers``."""
        return numbers(b"".join(self._pieces))


def numbers(end: bytes) -> dict[str, float]:
    """The last value of each figure that the ``end`` of an answer tells."""
    found = {}
    for name, key in _FIGURES.items():
        at = end.rfind(key)
        while at >= 0:
            number = _NUMBER.match(end, at + len(key))
            if number is not None:
                found[name] = float(number[1])
                break
            at = end.rfind(key, 0, at)
    return found


def details(record: RequestRecord, numbers: Mapping[str, float]) -> dict[str, Any]:
    """The field ``longleaf``; seconds, null where nobody knows."""
    steps = numbers.get("spec_verify_ct")
    return {
        "replica": record.replica,
        "attempts": record.attempts,
        "queue_seconds": _rounded(record.queue_seconds),
        "prefill_seconds": _rounded(record.prefill_seconds) if record.stream else None,
        "commit_len": numbers.get("spec_accept_length"),
        "steps": None if steps is None else int(steps),
    }


def with_field(body: bytes, field: Mapping[str, Any]) -> bytes:
    """A JSON object's text with ``longleaf`` added; unchanged if it is none."""
    end = body.rstrip()
    if not end.endswith(b"}"):
        return body
    between = b"" if end[:-1].rstrip().endswith(b"{") else b","
    return end[:-1] + between + b'"longleaf":' + json.dumps(field).encode() + b"}"


def with_chunk(piece: bytes, first: bytes, field: Mapping[str, Any]) -> bytes:
    """The last piece of a stream with one more chunk, like those of its ``first`` piece, before
    its ``[DONE]``; unchanged without one.
    """
    before, done, after = piece.rpartition(_DONE)
    if not done:
        return piece
    chunk = {**_identity(first), "choices": [], "longleaf": field}
    return before + b"data: " + json.dumps(chunk).encode() + b"\n\n" + done + after


def _identity(events: bytes) -> dict[str, Any]:
    """What all chunks of a stream have in common."""
    for line in events.splitlines():
        if line.startswith(b"data:"):
            try:
                chunk = json.loads(line[5:])
            except (ValueError, RecursionError):
                break
            if isinstance(chunk, dict):
                return {name: chunk[name] for name in _COMMON if name in chunk}
    return {}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
