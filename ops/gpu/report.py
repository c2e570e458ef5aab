"""Rows and plot of what `ops.gpu.measure` wrote.

``python -m ops.gpu.report FILE …``: writes ops/results/engine-h200.json and the plot beside it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import click

from ops.bench.results import Row, format_table, write_results
from ops.gpu.adaptive import KINDS
from ops.gpu.measure import (
    BENCH_NODES,
    EXTEND_FORMS,
    EXTENDS,
    STOCK_CONTEXTS,
    WIDTH_CONTEXTS,
    WIDTHS,
)
from ops.gpu.plot import name_of, write_plot

OURS = f"ddtree-{BENCH_NODES}"
BARS = {
    1024: (7.0, 5.5),
    8192: (7.5, 6.0),
    32_768: (9.0, 7.0),
    65_536: (12.0, 8.5),
    131_072: (15.0, 12.0),
    185_000: (18.0, 14.0),
}
"""Bar and stretch goal of a DDTREE step of nine nodes, in milliseconds, by context."""


class Measured:
    """Looks measurements up; the last of its kind counts."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def find(self, section: str, server: str, context: int) -> dict[str, Any] | None:
        """One measurement, or None where it was not made."""
        found: dict[str, Any] | None = None
        for entry in self._document.get(section, []):
            if entry["server"] == server and entry.get("context") == context:
                found = entry
        return found

    def entries(self, section: str) -> list[dict[str, Any]]:
        """All measurements of a section."""
        return list(self._document.get(section, []))


def time_row(
    name: str,
    entry: dict[str, Any] | None,
    bar: float | None = None,
    stretch: float | None = None,
) -> Row:
    """A row of a step time."""
    if entry is None:
        return Row(name, None, "ms", bar, "lower", why="not measured", stretch=stretch)
    spread = entry["spread"]
    count = entry.get("steps", entry.get("n", 1))
    return Row(
        name, entry["ms"], "ms", bar, "lower", count, (spread[0], spread[1]), stretch=stretch
    )


def step_rows(measured: Measured) -> Iterator[Row]:
    """Step times by context, ours and SGLang's own."""
    for context, (bar, stretch) in BARS.items():
        entry = measured.find("steps", OURS, context)
        yield time_row(f"ddtree_step_ms_{name_of(context)}", entry, bar, stretch)
    for context in STOCK_CONTEXTS:
        entry = measured.find("steps", "stock-dflash", context)
        yield time_row(f"stock_dflash_step_ms_{name_of(context)}", entry)
    for nodes in WIDTHS:
        for context in WIDTH_CONTEXTS:
            entry = measured.find("steps", f"ddtree-{nodes}", context)
            yield time_row(f"ddtree_{nodes}_nodes_step_ms_{name_of(context)}", entry)
    yield time_row("decode_step_ms_64k", measured.find("steps", "ours-plain", 65_536), 7.5, 6.5)
    first, last = (measured.find("steps", OURS, context) for context in (1024, 185_000))
    flat = round(last["ms"] / first["ms"], 3) if first and last else None
    why = None if flat else "not measured"
    yield Row("flatness_185k_over_1k", flat, "ratio", 2.6, "lower", why=why, stretch=2.0)


def prefill_rows(measured: Measured) -> Iterator[Row]:
    """Prefill over a cached prefix: one token, and 32k tokens."""
    for server, prefix, bar in ((OURS, "", 12.0), ("stock-dflash", "stock_", None)):
        entry = measured.find("extend1", server, 32_768)
        stretch = 8.0 if bar else None
        yield time_row(f"{prefix}extend1_32k_ms", entry, bar, stretch)
        seen = entry["client_ms"] if entry else None
        why = None if entry else "not measured"
        yield Row(f"{prefix}extend1_32k_client_ms", seen, "ms", better="lower", why=why)
    entry = measured.find("prefill", OURS, 65_536)
    seconds = entry["seconds"] if entry and 32_000 < entry["cached"] <= 32_768 else None
    why = None if seconds else "not measured"
    yield Row("prefill_32k_64k_s", seconds, "s", 4.0, "lower", why=why, stretch=2.5)


def extend_rows(measured: Measured) -> Iterator[Row]:
    """Both forms of an extend by its length, and the length up to which the absorbed one wins."""
    for prefix, lengths in EXTENDS.items():
        times: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in EXTEND_FORMS}
        for entry in measured.entries("extends"):
            if entry["context"] == prefix:
                times[entry["server"].removeprefix("extend-")][entry["new"]] = entry
        for name, found in times.items():
            for new, entry in sorted(found.items()):
                row = f"extend_{name_of(prefix)}_{new}_{name.replace('-', '_')}_ms"
                yield time_row(row, entry)
        absorbed = times["absorbed"]
        others = [found for name, found in times.items() if name != "absorbed"]
        tried = [new for new in lengths if all(new in found for found in times.values())]
        wins = [all(absorbed[new]["ms"] < found[new]["ms"] for found in others) for new in tried]
        unbroken = takewhile(bool, wins)
        best = [new for new, _ in zip(tried, unbroken, strict=False)]
        if absorbed:
            row = f"extend_{name_of(prefix)}_absorbed_wins_to"
            yield Row(row, max(best, default=0), "tokens", n=len(absorbed))


def profile_rows(measured: Measured) -> Iterator[Row]:
    """Shares of GPU time at 64k, the three largest gaps, and the phases of our metrics."""
    entry = measured.find("profile", OURS, 65_536)
    if entry is None:
        return
    for group, share in entry["groups"].items():
        yield Row(f"profile_64k_{group.replace(' ', '_')}", share, "share")
    yield Row("profile_64k_idle", entry["idle"], "share", better="lower")
    for phase, ms in entry["phases_ms"].items():
        yield Row(f"metrics_64k_{phase}_ms", round(ms, 3), "ms", better="lower")
    found = measured.find("profiled_steps", OURS, 65_536)
    if found is None:
        why = "not measured"
        yield Row("phases_metrics_vs_profiler", None, "share", 0.10, "lower", why=why)
        return
    steps = found["steps"]
    count = steps["count"]
    for number, gap in enumerate(steps["gaps"][:3], 1):
        before, after = gap["between"]
        where = f"{before} -> {after}, longest {' -> '.join(gap['kernels'])}; {gap['remedy']}"
        name = f"profile_64k_gap_{number}_us"
        yield Row(name, gap["microseconds"], "us", better="lower", n=count, why=where)
    host = steps["host"]
    for kind in ("kernels", "graphs", "copies", "operators"):
        unit = "operators a step" if kind == "operators" else "launches a step"
        yield Row(f"host_64k_{kind}", host[kind], unit, better="lower", n=count)
    for phase, ms in steps["phases"].items():
        yield Row(f"profile_64k_{phase}_ms", round(ms, 3), "ms", better="lower", n=count)
    yield Row(
        "phases_metrics_vs_profiler",
        found["disagreement"],
        "share",
        0.10,
        "lower",
        count,
        why=f"worst phase: {found['disagreeing_phase']}",
    )


def adaptive_rows(measured: Measured) -> Iterator[Row]:
    """How far the adaptive budget is behind the best fixed width, cell by cell, and over all."""
    entries = list(measured.entries("adaptive"))
    if len({(entry["kind"], entry["context"]) for entry in entries}) < len(KINDS) * len(
        WIDTH_CONTEXTS
    ):
        yield Row("adaptive_worst_regret", None, "share", 0.03, "lower", why="not measured")
        return
    for suffix, figure, bar in (
        ("", "tokens_per_second", 0.03),
        ("_wall", "wall_tokens_per_second", None),
    ):
        cells: dict[tuple[str, int], dict[str, float]] = {}
        for entry in entries:
            cells.setdefault((entry["kind"], entry["context"]), {})[entry["server"]] = entry[figure]
        fixed = [f"fixed-{nodes}" for nodes in WIDTHS]
        regrets = {
            cell: 1.0 - speeds["adaptive"] / max(speeds[name] for name in fixed)
            for cell, speeds in cells.items()
        }
        worst = max(regrets, key=lambda cell: regrets[cell])
        yield Row(
            f"adaptive_worst_regret{suffix}",
            round(regrets[worst], 4),
            "share",
            bar,
            "lower",
            len(cells),
            why=f"{worst[0]} at {name_of(worst[1])}",
        )
        seconds = {
            name: sum(1.0 / speeds[name] for speeds in cells.values())
            for name in (*fixed, "adaptive")
        }
        gain = min(seconds[name] for name in fixed) / seconds["adaptive"]
        better = 1.0 if bar is not None else None
        yield Row(
            f"adaptive_over_best_fixed_mix{suffix}", round(gain, 4), "ratio", better, n=len(cells)
        )


def soak_row(leaked: int | None) -> Row:
    """Slots of the KV pool that the soak test did not get back."""
    why = None if leaked is not None else "not measured"
    return Row("soak_leaked_tokens", leaked, "tokens", 0, "lower", 2000, why=why)


def rows_of(document: dict[str, Any]) -> list[Row]:
    """All rows of the results file."""
    measured = Measured(document)
    leaked = document.get("soak_leaked_tokens")
    return [
        *step_rows(measured),
        *prefill_rows(measured),
        *extend_rows(measured),
        *adaptive_rows(measured),
        soak_row(leaked),
        *profile_rows(measured),
    ]


def merged(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put runs of single parts together; of a thing measured in several, the last counts."""
    found: dict[str, Any] = {}
    for document in documents:
        for name, value in document.items():
            found[name] = found.get(name, []) + value if isinstance(value, list) else value
    return found


def write_rows(
    bench: str, command: str, rows: Sequence[Row], document: dict[str, Any], commit: str | None
) -> Path:
    """Write the results file of what was measured on the machine that the document names."""
    machine = document["machine"]
    return write_results(
        bench,
        command,
        rows,
        gpu=machine["gpu"],
        slug="h200",
        driver=machine["driver"],
        commit=commit,
    )


@click.command()
@click.argument(
    "measurements", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)
@click.option("--commit", help="What was measured, where it is not this checkout.")
@click.option("--leaked", type=int, help="soak_leaked_tokens, as the soak test printed it.")
def main(measurements: Sequence[Path], commit: str | None, leaked: int | None) -> None:
    """Write ops/results/engine-h200.json and engine-h200.svg from one run's files, or several's."""
    document = merged([json.loads(path.read_text()) for path in measurements])
    if leaked is not None:
        document["soak_leaked_tokens"] = leaked
    rows = rows_of(document)
    path = write_rows("engine", "make bench-engine", rows, document, commit)
    click.echo(format_table(rows))
    click.echo(f"written to {path} and {write_plot(path)}")


if __name__ == "__main__":
    main()
