"""Rows of what ``ops.gpu.truth`` recorded: ``python -m ops.gpu.truth_report DIR --commit …``."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from prometheus_client import CollectorRegistry

from longleaf.exporters.gpu import GpuExporter
from longleaf.exporters.recording import load_recording
from longleaf.metrics import GPU_METRICS, GpuMetrics
from ops.bench.results import Row, format_table, write_results

SHARES = ("tensor_active_ratio", "dram_active_ratio", "sm_active_ratio", "sm_resident_ratio")


def published(recording: Path, gpu: str = "0") -> dict[str, list[float]]:
    """What the exporter publishes of a recording: by metric, sample by sample."""
    registry = CollectorRegistry()
    sources = load_recording(recording)
    exporter = GpuExporter(sources, GpuMetrics(registry))
    found: dict[str, list[float]] = {}
    for _ in range(max(len(source.samples) for source in sources)):
        exporter.sample()
        for name in GPU_METRICS:
            value = registry.get_sample_value(f"longleaf_gpu_{name}", {"gpu": gpu})
            if value is not None:
                found.setdefault(name, []).append(value)
    return found


def losses(recording: Path) -> dict[str, str]:
    """Why a metric was told no more at the recording's end, by metric."""
    found: dict[str, str] = {}
    for source in load_recording(recording):
        if source.samples and isinstance(last := source.samples[-1], str):
            told = len(source.samples) - 1
            found |= dict.fromkeys(source.open(), f"{last}, after {told} sample{'s' * (told != 1)}")
    return found


def rows_of(folder: Path, document: dict[str, Any]) -> Iterator[Row]:
    """A row for each figure of each load, and what watching cost."""
    for seen in document["observed"]:
        path = folder / seen["recording"]
        name = path.stem.replace("-", "_")
        figures = published(path)
        lost = losses(path)
        for metric in SHARES:
            if metric in lost:
                yield Row(f"{name}_{metric}", None, "ratio", why=lost[metric])
            elif metric in figures:
                yield _row(f"{name}_{metric}", figures[metric], "ratio")
        if "power_watts" in figures:
            yield _row(f"{name}_power", figures["power_watts"], "W")
        alone = statistics.fmean(seen["alone"])
        if alone:
            unit, scale = ("TFLOP/s", 1e12) if seen["unit"] == "FLOP/s" else ("GB/s", 1e9)
            yield Row(f"{name}_rate", alone / scale, unit, n=len(seen["alone"]))
            yield _cost(
                f"{name}_slowdown", 100 * (1 - seen["watched"] / alone), "%", seen, "slowdown"
            )
        yield _cost(f"{name}_exporter_cpu", 100 * seen["cpu_share"], "% of a core", seen, "cpu")


def _cost(name: str, value: float, unit: str, seen: dict[str, Any], what: str) -> Row:
    """What watching cost, or why this run cannot tell."""
    why = seen.get("untold", {}).get(what)
    return Row(name, value if why is None else None, unit, better="lower", why=why)


def _row(name: str, values: Sequence[float], unit: str) -> Row:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Row(name, median, unit, n=len(values), spread=(low, high))


@click.command()
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option("--commit", help="What was measured.  [this checkout's]")
def main(folders: tuple[Path, ...], commit: str | None) -> None:
    """Write ops/results/gpu-truth-h200.json from FOLDERS, a later one's rows before an earlier
    one's, and print it.
    """
    rows: dict[str, Row] = {}
    gpu: dict[str, Any] = {}
    for folder in folders:
        document = json.loads((folder / "gpu-truth.json").read_text())
        gpu = document["gpu"]
        rows |= {row.name: row for row in rows_of(folder, document)}
    slug = gpu["name"].lower().removeprefix("nvidia ").replace(" ", "-")
    path = write_results(
        "gpu-truth",
        "python -m ops.gpu.truth --out DIR",
        list(rows.values()),
        gpu=gpu["name"],
        slug=slug,
        driver=gpu["driver"],
        commit=commit,
    )
    click.echo(format_table(list(rows.values())))
    click.echo(path)


if __name__ == "__main__":
    main()
