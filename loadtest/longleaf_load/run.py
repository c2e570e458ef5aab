"""One run: its plan, its records, and the report at its end."""

import json
import platform
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longleaf.metrics import context_bucket
from longleaf_load.plan import Plan
from longleaf_load.prompts import PromptSource
from longleaf_load.records import Record, write_records
from longleaf_load.report import headline, page
from longleaf_load.slo import Slo
from longleaf_load.summary import summarize

_FEW = 5
_STOPPED = 3


@dataclass(kw_only=True)
class Run:
    """``begin`` starts its clock. ``records`` are those of this process; a worker hands them over
    by ``take``.
    """

    plan: Plan
    source: PromptSource
    slo: Slo
    url: str
    model: str
    key: str | None
    workers: int
    out: Path
    plan_name: str
    records: list[Record] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    finished: set[str] = field(default_factory=set)
    in_flight: int = 0
    begun: bool = False
    done: bool = False
    closed: bool = False
    _taken: int = 0
    _begun: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """The clock starts."""
        self.begun = True
        self._begun = time.monotonic()

    def clock(self) -> float:
        """Seconds since ``begin``."""
        return time.monotonic() - self._begun

    def wait_until(self, at: float, sleep: Callable[[float], object]) -> None:
        """Sleep until the clock shows ``at``."""
        left = at - self.clock()
        if left > 0:
            sleep(left)

    def add(self, record: Record) -> None:
        """A request is over."""
        self.records.append(record)
        self.outcomes[record.outcome] += 1

    def take(self) -> list[Record]:
        """Records since the last call."""
        fresh = self.records[self._taken :]
        self._taken = len(self.records)
        return fresh

    def bucket(self, record: Record) -> str:
        """Its context's bucket."""
        return context_bucket(record.prompt_tokens)

    def saturated_before(self, phase: int) -> bool:
        """Whether the plan ends before ``phase``: too little of the one before was served."""
        own = [one for one in self.records if one.phase == phase - 1 and one.outcome != "cancelled"]
        if not self.plan.stop_below or len(own) < _FEW:
            return False
        return sum(map(self.slo.met_by, own)) < self.plan.stop_below * len(own)

    def close(self) -> int:
        """Write the report; the exit status: 0 if the objective was met, 3 if the run was stopped
        before its end, whatever was met until then.
        """
        self.closed = True
        report = summarize(self.records, self.plan.phases, self.slo, self._about())
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (self.out / "report.html").write_text(page(report))
        write_records(self.out / "records.jsonl", self.records)
        print(f"\n{headline(report)}\nreport: {self.out / 'report.html'}", file=sys.stderr)
        if not self.done:
            return _STOPPED
        return 0 if report["slo"]["passed"] else 1

    def _about(self) -> dict[str, Any]:
        return {
            **machine(),
            "url": self.url,
            "model": self.model,
            "plan": self.plan_name,
            "seed": self.plan.seed,
            "workers": self.workers,
            "stopped_after_seconds": None if self.done else round(self.clock(), 3),
            "command": shlex.join(sys.argv),
        }


def machine() -> dict[str, Any]:
    """When, of what commit and where something was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": f"{_cpu()}, {platform.system()}",
    }


def _commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
