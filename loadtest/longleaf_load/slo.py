"""A service level objective: what a request must meet, and how many of them must."""

from collections.abc import Sequence
from dataclasses import dataclass

from longleaf_load.lengths import PlanError
from longleaf_load.records import Record


@dataclass(frozen=True, slots=True)
class Slo:
    """``ttft_ms`` grows by ``ttft_ms_per_1k`` for each 1,000 tokens of the prompt; None: no bound.
    ``share`` of the requests must meet all of them.
    """

    ttft_ms: float | None = None
    ttft_ms_per_1k: float = 0.0
    tpot_ms: float | None = None
    gap_p99_ms: float | None = None
    share: float = 0.95

    def met_by(self, record: Record) -> bool:
        """Whether the request was served, and in time."""
        if record.outcome != "ok":
            return False
        ttft = None
        if self.ttft_ms is not None:
            ttft = self.ttft_ms + self.ttft_ms_per_1k * record.prompt_tokens / 1e3
        return (
            _within(record.ttft, ttft)
            and _within(record.tpot, self.tpot_ms)
            and _within(record.gap_p99, self.gap_p99_ms)
        )

    def words(self) -> str:
        """In words."""
        parts = []
        if self.ttft_ms is not None:
            more = f" + {self.ttft_ms_per_1k:g} ms / 1,000 tokens" if self.ttft_ms_per_1k else ""
            parts.append(f"first token within {self.ttft_ms:g} ms{more}")
        if self.tpot_ms is not None:
            parts.append(f"{self.tpot_ms:g} ms a token")
        if self.gap_p99_ms is not None:
            parts.append(f"99 % of gaps within {self.gap_p99_ms:g} ms")
        return ", ".join(parts) or "served at all"


def parse_slo(items: Sequence[str]) -> Slo:
    """Read ``ttft_ms=2000 tpot_ms=50``. ``PlanError`` names what is wrong."""
    values: dict[str, float] = {}
    known = list(Slo.__slots__)
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or name not in known:
            raise PlanError(f"--slo: {item!r} is not one of {', '.join(known)} with =NUMBER")
        try:
            values[name] = float(text)
        except ValueError:
            raise PlanError(f"--slo: {name} must be a number, got {text!r}") from None
        if not values[name] > 0 or (name == "share" and values[name] > 1):
            most = " and at most 1" if name == "share" else ""
            raise PlanError(f"--slo: {name} must be above 0{most}, got {text}")
    if "ttft_ms_per_1k" in values and "ttft_ms" not in values:
        raise PlanError("--slo: ttft_ms_per_1k is added to ttft_ms, which is missing")
    return Slo(**values)


def _within(seconds: float | None, limit_ms: float | None) -> bool:
    return limit_ms is None or seconds is None or seconds * 1e3 <= limit_ms
