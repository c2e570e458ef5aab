"""Whether a ``Retry-After`` came true: when would the refused request have been served?

Nobody can know what would have been; the request that came next and was let in stood where the
refused one would have stood. It started (left the queue for a replica) so and so long after the
refusal: that is the truth that the promise is held against. A short prompt may overtake long ones,
so it is compared with the next short one, a long one with the next long one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from longleaf_load.records import Record

SHORT_PROMPT_TOKENS = 4_096
"""The gateway's default: a prompt up to this length may overtake."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Seconds: what was told, what was true. ``phase``: that of the refused request."""

    told: float
    true: float
    phase: int

    @property
    def error(self) -> float:
        """Relative to the truth, of at least one second (the header's unit)."""
        return abs(self.told - self.true) / max(1.0, self.true)


def promises(records: Sequence[Record], short: int = SHORT_PROMPT_TOKENS) -> list[Promise]:
    """A promise for each refusal that has a ``Retry-After`` and a successor that was served,
    which may have come in a later phase: ``records`` are those of the whole run.
    """
    found: list[Promise] = []
    for is_short in (True, False):
        same = [record for record in records if (record.prompt_tokens <= short) is is_short]
        served = sorted(
            (record.sent, start)
            for record in same
            if record.outcome == "ok" and (start := _start(record)) is not None
        )
        arrivals = [sent for sent, _ in served]
        for record in same:
            if record.outcome != "refused" or record.retry_after is None:
                continue
            refused = record.sent + (record.seconds or 0.0)
            place = bisect_left(arrivals, refused)
            if place < len(served):
                true = served[place][1] - refused
                found.append(Promise(record.retry_after, true, record.phase))
    return found


def _start(record: Record) -> float | None:
    """When it went to a replica."""
    if record.ttft is None or record.prefill_seconds is None:
        return None
    return record.sent + max(0.0, record.ttft - record.prefill_seconds)
