"""The results file of a benchmark: rows with values, bars and spread, beside machine and commit."""

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

RESULTS_DIR = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured value.

    ``bar`` is a number, or a ``[low, high]`` pair where the value must lie between. ``value`` is
    None where it could not be measured, and ``why`` then says so. ``spread`` is the interquartile
    range of the ``n`` samples behind the value. ``stretch`` is a goal beyond the bar.
    """

    name: str
    value: float | None
    unit: str
    bar: float | tuple[float, float] | None = None
    better: Literal["higher", "lower", "between"] = "higher"
    n: int = 1
    spread: tuple[float, float] | None = None
    why: str | None = None
    stretch: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None where there is no bar or no value."""
        if self.bar is None or self.value is None:
            return None
        if isinstance(self.bar, tuple):
            return self.bar[0] <= self.value <= self.bar[1]
        return self.value >= self.bar if self.better == "higher" else self.value <= self.bar


def write_results(
    bench: str,
    command: str,
    rows: Sequence[Row],
    *,
    gpu: str | None = None,
    slug: str | None = None,
    driver: str | None = None,
    commit: str | None = None,
    directory: Path = RESULTS_DIR,
) -> Path:
    """Write ``<directory>/<bench>[-<slug>].json`` and return its path.

    gpu: the GPU's full name, for measurements on one, slug: its short one. commit: what was
    measured, for machines whose files are no git checkout; by default the checkout's.
    """
    document = {
        "bench": bench,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "machine": {"cpu": _cpu(), "gpu": gpu, "driver": driver},
        "command": command,
        "rows": [
            {key: v for key, v in asdict(row).items() if v is not None or key == "value"}
            for row in rows
        ],
    }
    path = directory / (f"{bench}-{slug}.json" if slug else f"{bench}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def format_table(rows: Sequence[Row]) -> str:
    """The rows as an aligned text table with a verdict each."""
    width = max([28, *(len(row.name) + 2 for row in rows)])
    lines = [f"{'row':<{width}}{'value':>10} {'unit':<10}{'bar':>14}  {'n':>5}  verdict"]
    for row in rows:
        value = "-" if row.value is None else f"{row.value:.3f}"
        if row.bar is None:
            bar = "-"
        elif isinstance(row.bar, tuple):
            bar = f"{row.bar[0]:g} to {row.bar[1]:g}"
        else:
            bar = f"{'>=' if row.better == 'higher' else '<='} {row.bar:g}"
        verdict = {True: "met", False: "MISSED", None: row.why or ""}[row.met]
        if row.stretch is not None:
            verdict += f" (stretch {row.stretch:g})"
        lines.append(
            f"{row.name:<{width}}{value:>10} {row.unit:<10}{bar:>14}  {row.n:>5}  {verdict}"
        )
    return "\n".join(lines)


def _commit() -> str:
    """The measured commit; ``-dirty`` where the working tree differs from it outside results."""
    git = ["git", "-C", str(RESULTS_DIR.parent)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    status = subprocess.run(
        [
            *git,
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ":/",
            ":(exclude,top)ops/results",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return head.stdout.strip() + ("-dirty" if status.stdout.strip() else "")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
