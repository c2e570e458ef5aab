"""The usage of a stream whose key has a limit of tokens, whether its client wants it or not.

The engine tells it only where it is asked to, so the gateway asks, and cuts the chunk out again
for a client that did not.
"""

import json
import math
import re

_EVENT_ENDS = re.compile(rb"(?<=\n\n)|(?<=\r\n\r\n)")
_TOLD = b'"prompt_tokens"'


class StreamUsage:
    """Passes a stream's pieces on. ``hidden``: without the chunk that only tells the usage."""

    def __init__(self, hidden: bool) -> None:
        self._hidden = hidden
        self._events = 0

    def passed(self, piece: bytes) -> bytes:
        """What of a piece (whole events) the client gets."""
        self._events += piece.count(b"\n\n") + piece.count(b"\r\n\r\n")
        if not self._hidden or _TOLD not in piece:
            return piece
        return b"".join(event for event in _EVENT_ENDS.split(piece) if not _is_usage(event))

    def estimate(self, commit_len: float | None) -> int:
        """Completion tokens of a stream that ended before its usage: a step is an event."""
        return math.ceil(self._events * max(1.0, commit_len or 1.0))


def _is_usage(event: bytes) -> bool:
    """Whether an event is a chunk without choices that tells the usage, and nothing else."""
    if not event.startswith(b"data:"):
        return False
    try:
        chunk = json.loads(event[5:])
    except (ValueError, RecursionError):
        return False
    if not isinstance(chunk, dict) or chunk.get("choices") or "sglext" in chunk:
        return False
    return isinstance(chunk.get("usage"), dict)
