"""Rows of what ``ops.gpu.probes`` measured: ``python -m ops.gpu.probes_report DIR --commit …``."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from longleaf.exporters.recording import load_recording
from longleaf.probes.bounds import FIGURES
from longleaf.probes.lengths import label
from ops.bench.results import Row, format_table, write_results

_SERVERS = ("ours", "stock")


def rows_of(folder: Path) -> Iterator[Row]:
    """A row for each figure of each phase, each step time and each commit_len; ``folder``: where
    the probes wrote their JSON.
    """
    for server in _SERVERS:
        for phase in _read(folder, f"gpu-{server}")["phases"]:
            name = f"gpu_{server}_{phase['name']}"
            samples = phase["gpus"]["0"]["samples"]
            for metric in FIGURES:
                unit = "W" if metric == "power_watts" else "ratio"
                yield _row(f"{name}_{metric}", samples.get(metric, []), unit)
            if phase.get("step_seconds") is not None:
                yield Row(f"{name}_step_ms", phase["step_seconds"] * 1e3, "ms", better="lower")
    for server, engine in zip(_SERVERS, _read(folder, "step")["engines"], strict=True):
        for cell in engine["cells"]:
            seconds = [sample * 1e3 for sample in cell["samples"]]
            name = f"step_{server}_{label(cell['context'])}_ms"
            yield _row(name, seconds, "ms", "lower", cell["why"])
    for cell in _read(folder, "commit")["cells"]:
        name = f"commit_tiny_{cell['text']}_{label(cell['context'])}"
        yield _row(name, cell["samples"], "tokens", "higher", cell["why"])


def _row(
    name: str, values: Sequence[float], unit: str, better: Any = "higher", why: str = ""
) -> Row:
    """The mean, as probes print it."""
    if not values:
        return Row(name, None, unit, better=better, why=why or "not told")
    spread = None
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        spread = low, high
    return Row(name, statistics.fmean(values), unit, better=better, n=len(values), spread=spread)


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--commit", help="What was measured.  [this checkout's]")
def main(folder: Path, commit: str | None) -> None:
    """Write ops/results/probes-<gpu>.json from FOLDER, and print it."""
    sources = load_recording(folder / "recording.json")
    gpus = [gpu for source in sources for gpu in source.identify().values()]
    name, _, driver = gpus[0]
    rows = list(rows_of(folder))
    path = write_results(
        "probes",
        "python -m ops.gpu.probes",
        rows,
        gpu=name,
        slug=name.lower().removeprefix("nvidia ").replace(" ", "-"),
        driver=driver,
        commit=commit,
    )
    click.echo(format_table(rows))
    click.echo(path)


if __name__ == "__main__":
    main()
