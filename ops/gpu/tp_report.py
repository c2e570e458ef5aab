"""Rows of what `ops.gpu.tp_check` wrote: ``python -m ops.gpu.tp_report FILE``."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ops.bench.results import Row, format_table
from ops.gpu.plot import name_of
from ops.gpu.report import Measured, time_row, write_rows
from ops.gpu.tp_check import CONTEXTS, LEAST_STEPS, LEFT_MIB, PARTS


def step_rows(measured: Measured, tp: int) -> Iterator[Row]:
    """Step times by context, and against one GPU and against plain decoding."""
    for context in CONTEXTS:
        where = name_of(context)
        many, one, plain = (
            measured.find("steps", role, context) for role in ("many", "one", "plain")
        )
        yield time_row(f"tp{tp}_step_ms_{where}", many)
        yield time_row(f"tp{tp}_same_heads_tp1_step_ms_{where}", one)
        yield time_row(f"tp{tp}_plain_step_ms_{where}", plain)
        for name, other in (("over_tp1", one), ("over_plain", plain)):
            ratio = round(many["ms"] / other["ms"], 3) if many and other else None
            why = None if ratio else "not measured"
            yield Row(f"tp{tp}_step_{name}_{where}", ratio, "ratio", better="lower", why=why)


def profile_rows(measured: Measured, tp: int) -> Iterator[Row]:
    """All-reduce and idle time a step at 64k, and the phases of our metrics."""
    entry = measured.find("profile", "many", 65_536)
    found = measured.find("profiled_steps", "many", 65_536)
    names = (f"tp{tp}_allreduce_ms_64k", f"tp{tp}_gap_ms_64k")
    for name, key in zip(names, ("all_reduce", "idle"), strict=True):
        if found is None:
            yield Row(name, None, "ms", better="lower", why="not measured")
            continue
        steps = found["steps"]
        yield Row(name, round(steps[key], 3), "ms", better="lower", n=steps["count"])
    for phase, ms in (entry["phases_ms"] if entry else {}).items():
        yield Row(f"tp{tp}_metrics_64k_{phase}_ms", round(ms, 3), "ms", better="lower")


def rank_rows(document: dict[str, Any], tp: int) -> Iterator[Row]:
    """Steps compared and steps that differ, and greedy answers that rounding does not explain."""
    kinds = {entry["kind"]: entry for entry in document.get("ranks", [])}
    complete = set(kinds) == {"greedy", "sampled"}
    why = None if complete else "not measured"
    steps = min(entry["steps"] for entry in kinds.values()) if complete else None
    bad = sum(entry["mismatched"] for entry in kinds.values()) if complete else None
    yield Row(
        f"tp{tp}_compared_steps", steps, "steps, the fewer of both kinds", LEAST_STEPS, why=why
    )
    yield Row(f"tp{tp}_mismatched_steps", bad, "steps", 0, "lower", n=steps or 1, why=why)
    answers = document.get("answers", [])
    last = answers[-1] if answers else None
    count = last["compared"] if last else 1
    why = None if last else "not measured"
    found = len(last["wrong"]) if last else None
    yield Row(f"tp{tp}_wrong_answers", found, "answers", 0, "lower", count, why=why)
    parted = last["parted"] if last else None
    yield Row(f"tp{tp}_parted_answers", parted, "answers", better="lower", n=count, why=why)


def kill_rows(document: dict[str, Any], tp: int) -> Iterator[Row]:
    """How a server ends of which one rank is killed."""
    entries = document.get("kill", [])
    entry = entries[-1] if entries else None
    why = None if entry else "not measured"
    status = entry["launcher_status"] if entry else None
    said = entry["launcher_said"] if entry else why
    told = int('"error"' in entry["gateway"]) if entry else None
    yield Row(f"tp{tp}_kill_error_event", told, "0 or 1", 1, why=entry["gateway"] if entry else why)
    yield Row(f"tp{tp}_kill_launcher_status", status, "exit status", 1, why=said)
    left = entry["processes_left"] if entry else None
    yield Row(f"tp{tp}_kill_processes_left", left, "processes", 0, "lower", why=why)
    memory = max(entry["mib_left"]) if entry else None
    yield Row(f"tp{tp}_kill_mib_left", memory, "MiB", LEFT_MIB, "lower", why=why)


def rows_of(document: dict[str, Any]) -> list[Row]:
    """All rows of the results file."""
    tp = int(document["tp"])
    measured = Measured(document)
    return [
        *step_rows(measured, tp),
        *profile_rows(measured, tp),
        *rank_rows(document, tp),
        *kill_rows(document, tp),
    ]


@click.command()
@click.argument("measurements", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--commit", help="What was measured, where it is not this checkout.")
def main(measurements: Path, commit: str | None) -> None:
    """Write ops/results/engine-tpN-h200.json."""
    document = json.loads(measurements.read_text())
    rows = rows_of(document)
    path = write_rows(f"engine-tp{document['tp']}", "make check-tp", rows, document, commit)
    click.echo(format_table(rows))
    for entry in document.get("failed", []):
        click.echo(f"part {entry['part']} of {', '.join(PARTS)} failed: {entry['error'][:300]}")
    click.echo(f"written to {path}")


if __name__ == "__main__":
    main()
