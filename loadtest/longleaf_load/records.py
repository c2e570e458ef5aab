"""One record a request: what was asked, what came back, and when."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(slots=True, kw_only=True)
class Record:
    """Times in seconds; ``sent`` since the run began, the others since then. None: not known.

    ``outcome``: ok, refused (an error status before the answer), failed (an answer that broke off,
    no connection, a time-out) or cancelled (the client left). ``late``: sent so much after the
    plan's time. ``tpot``: time per token after the first one. ``gap_p99``: between two events.
    """

    arrival: int
    phase: int
    turn: int
    attempt: int
    text: str
    prompt_tokens: int
    max_tokens: int
    document: int | None
    sent: float
    late: float
    outcome: str = "failed"
    status: int | None = None
    reason: str | None = None
    retry_after: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    gap_p99: float | None = None
    gap_max: float | None = None
    seconds: float | None = None
    counted_tokens: int | None = None
    completion_tokens: int | None = None
    commit_len: float | None = None
    steps: int | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    replica: str | None = None
    fingerprint: str | None = None
    events: int = 0
    answer: str = field(default="", repr=False)
    """Its text; not kept."""

    def row(self) -> dict[str, Any]:
        """As a JSON object, without the answer's text."""
        values = asdict(self)
        del values["answer"]
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in values.items()
        }


_NAMES = {one.name for one in fields(Record)}


def from_row(row: dict[str, Any]) -> Record:
    """Read ``Record.row``."""
    return Record(**{name: value for name, value in row.items() if name in _NAMES})


def write_records(path: Path, records: Iterable[Record]) -> None:
    """One JSON object a line; what was written stays where the disk is full before the end."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record.row()) + "\n" for record in records)


def read_records(path: Path) -> Iterator[Record]:
    """Read ``write_records``."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield from_row(json.loads(line))
