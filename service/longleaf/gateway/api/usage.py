"""What a key with a limit of tokens has used, whether its client wants to know it or not.

The engine tells a stream's usage only where it is asked to, so the gateway asks, and cuts the chunk
out again for a client that did not. Where nothing is told, what was generated is estimated.
"""

import json
import math
import re

from longleaf.gateway.admission.intake import Ticket

_EVENT_ENDS = re.compile(rb"(?<=\n\n)|(?<=\r\n\r\n)")
_TOLD = b'"prompt_tokens"'
_IDENTITY = frozenset({"id", "object", "created", "model", "system_fingerprint", "choices"})
"""What a chunk that tells nothing has."""


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
        return b"".join(_without_usage(event) for event in _EVENT_ENDS.split(piece))

    def estimate(self, commit_len: float | None) -> int:
        """Completion tokens of a stream that ended before its usage: a step is an event."""
        return math.ceil(self._events * max(1.0, commit_len or 1.0))


def taken_at_most(ticket: Ticket, completion: int) -> int:
    """Tokens of prompt and ``completion``, an estimate: where the request names a limit no more
    than that allows.
    """
    demand = ticket.ask.demand
    taken = demand.counted_prompts + completion
    limited = demand.max_tokens is not None or demand.default_tokens is not None
    return min(taken, ticket.charge.tokens) if limited else taken


def taken_unseen(ticket: Ticket, stream: bool, seconds: float) -> int:
    """Tokens of a request whose client left ``seconds`` after it was sent, before any event.

    Of a stream that is its prompt; of a whole answer also what the replica can have generated since
    then, or, where its step time is not known, all that was asked for.
    """
    demand, budget = ticket.ask.demand, ticket.grant.replica.budget
    if stream or not seconds:
        return demand.counted_prompts
    context, batch = budget.context + demand.size, budget.batch + demand.sequences
    token_seconds = budget.steps.token_seconds(context, batch)
    if token_seconds is None:
        return ticket.charge.tokens
    decode = max(0.0, seconds - (budget.steps.prefill_seconds(demand.counted_prompts) or 0.0))
    return taken_at_most(ticket, demand.sequences * math.ceil(decode / token_seconds))


def _without_usage(event: bytes) -> bytes:
    """An event but for the usage that a chunk without choices tells: nothing, where that is all."""
    before, data, text = (b"\n" + event).partition(b"\ndata:")
    line, end, after = text.partition(b"\n")
    try:
        chunk = json.loads(line)
    except (ValueError, RecursionError):
        return event
    if not isinstance(chunk, dict) or chunk.get("choices"):
        return event
    if not isinstance(chunk.pop("usage", None), dict):
        return event
    if chunk.keys() <= _IDENTITY:
        return b""
    kept = json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()
    return (before + data + b" " + kept + end + after)[1:]
