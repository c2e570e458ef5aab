"""A service level objective: what a request must meet, and how many of them must."""

from collections.abc import Iterator, Sequence
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
        """Whether the request was served, and in time. What has a bound must have been measured."""
        return record.outcome == "ok" and all(
            value is not None and value * 1e3 <= limit for _, value, limit in self._bounds(record)
        )

    def unmeasured(self, record: Record) -> list[str]:
        """The figures that have a bound, of a request that was served, and were not measured."""
        if record.outcome != "ok":
            return []
        return [name for name, value, _ in self._bounds(record) if value is None]

    def _bounds(self, record: Record) -> Iterator[tuple[str, float | None, float]]:
        """Figure, seconds and the most milliseconds. An answer of one token has no time per token,
        one of one event no gaps: it meets every bound of these.
        """
        if self.ttft_ms is not None:
            most = self.ttft_ms + self.ttft_ms_per_1k * record.prompt_tokens / 1e3
            yield "ttft_ms", record.ttft, most
        if self.tpot_ms is not None and record.completion_tokens != 1:
            yield "tpot_ms", record.tpot, self.tpot_ms
        if self.gap_p99_ms is not None and record.events != 1:
            yield "gap_p99_ms", record.gap_p99, self.gap_p99_ms

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
