"""How far a run is, and how long it will take."""

from typing import TextIO

from longleaf_load.plan import Plan
from longleaf_load.run import Run

_WIDTH = 20


class Progress:
    """Writes to a terminal in place, to anything else a line at a time."""

    def __init__(self, plan: Plan, out: TextIO) -> None:
        self._plan = plan
        self._out = out

    def tell(self, run: Run) -> None:
        """Say where ``run`` is."""
        print(self.line(run), end="" if self._out.isatty() else "\n", file=self._out, flush=True)

    def line(self, run: Run) -> str:
        """One line: share of the time, time left, phase, what came of the requests."""
        now, total = run.clock(), self._plan.seconds
        share = min(1.0, now / total)
        bar = "#" * round(_WIDTH * share)
        begin, name = 0.0, "last answers"
        for phase in self._plan.phases:
            if now < begin + phase.seconds:
                name = phase.name
                break
            begin += phase.seconds
        counts = ", ".join(f"{count} {outcome}" for outcome, count in run.outcomes.items())
        start = "\r\x1b[K" if self._out.isatty() else ""
        left = max(0.0, total - now)
        return (
            f"{start}[{bar:<{_WIDTH}}] {left:.0f} s left, phase {name}: {counts or 'none answered'}"
        )
