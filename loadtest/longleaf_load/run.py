"""One run: its plan, its records, and the report at its end."""

import json
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longleaf.metrics import context_bucket
from longleaf_load.interrupts import interrupt_once, keyboard_interrupt, uninterrupted
from longleaf_load.outputs import Outputs
from longleaf_load.plan import Plan
from longleaf_load.prompts import PromptSource
from longleaf_load.records import Record, write_records
from longleaf_load.report import headline, page, reasons_line, simulated_note
from longleaf_load.simulation import LABEL, Lag, label, simulated
from longleaf_load.slo import Slo
from longleaf_load.summary import summarize
from longleaf_load.workers import Workers

_FEW = 5
_UNWRITTEN = 2
_STOPPED = 3


@dataclass(kw_only=True)
class Run:
    """``begin`` starts its clock. ``records`` are those of this process; a worker hands them over
    by ``take`` and makes no report (``reports``).
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
    senders: Workers = field(default_factory=Workers)
    reports: bool = True
    in_flight: int = 0
    begun: bool = False
    done: bool = False
    closed: bool = False
    _lag: Lag = field(default_factory=Lag)
    _closing: threading.Lock = field(default_factory=threading.Lock)
    _status: int = 0
    _taken: int = 0
    _begun: float = field(default_factory=time.monotonic)

    def begin(self, interrupt: Callable[[], object] = keyboard_interrupt) -> None:
        """The clock starts. From now on one Ctrl-C ends the run by ``interrupt``, and a second one
        does not keep the first from making its report.
        """
        interrupt_once(interrupt)
        self.begun = True
        if self.reports:
            self._lag.see(self.url)
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
        if self.reports and record.replica and (record.fingerprint or "").startswith(LABEL):
            self._lag.see(record.replica)

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
        """Write the report; the exit status: 0 if the objective was met, 2 where something could
        not be written, 3 if the run was stopped before its end or lost a worker, whatever was met.

        Who calls it meanwhile waits for the same status: of two signals, none ends the other's run.
        """
        with self._closing, uninterrupted():
            if not self.closed:
                self._status = self._close()
                self.closed = True
        return self._status

    def _close(self) -> int:
        """Records first: a report can be made of them, they of nothing."""
        stopped = None if self.done else self.clock()
        records, lost = tuple(self.records), len(self.senders.lost)
        out = Outputs(self.out)
        out.write("records.jsonl", lambda path: write_records(path, records))
        about = {
            **self._about(),
            "workers_lost": lost,
            "stopped_after_seconds": stopped,
            "ran_seconds": self._ran_seconds(records) if stopped is None else stopped,
            **self._simulation(records),
        }
        report = summarize(records, self.plan.phases, self.slo, about)
        out.write_whole("report.json", json.dumps(report, indent=1) + "\n")
        out.write_whole("report.html", page(report))
        out.write_whole("SIMULATED.txt", simulated_note(report))
        print(f"\n{headline(report)}", file=sys.stderr)
        if why := reasons_line(report):
            print(why, file=sys.stderr)
        for caution in report["cautions"]:
            print(f"CAUTION: {caution}", file=sys.stderr)
        for failure in out.failures:
            print(f"longleaf_load: error: {failure}", file=sys.stderr)
        if out.failures:
            return _UNWRITTEN
        print(f"report: {self.out / 'report.html'}", file=sys.stderr)
        if not self.done or lost:
            return _STOPPED
        return 0 if report["slo"]["passed"] else 1

    def _ran_seconds(self, records: Sequence[Record]) -> float:
        """Of a run that came to its end: its phases' seconds, those left out that it did not come
        to for too little was served.
        """
        phases = self.plan.phases
        if self.plan.stop_below and records:
            phases = phases[: 1 + max(record.phase for record in records)]
        return sum(phase.seconds for phase in phases)

    def _simulation(self, records: Sequence[Record]) -> dict[str, Any]:
        """Whether a simulated engine answered, and how well it kept up."""
        found = simulated(records)
        if records and not found and not self.outcomes["ok"]:
            told = label(self.url, self.plan.api, self.model, self.key)
            found = [told] if told is not None and told.startswith(LABEL) else []
        if not found:
            return {"simulated": []}
        return {"simulated": found, "simulation_lost_seconds": self._lag.seconds()}

    def _about(self) -> dict[str, Any]:
        return {
            **machine(),
            "url": self.url,
            "model": self.model,
            "plan": self.plan_name,
            "seed": self.plan.seed,
            "workers": self.workers,
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
