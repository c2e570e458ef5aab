"""The GPU exporter, as a process of its own, beside loads whose figures are known."""

import statistics
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kernel_bench.sglang import SglangMissingError, find_sources
from ops.gpu.known_loads import known_loads
from ops.gpu.truth import Seconds, observe
from ops.gpu.truth_report import published
from tests.exporters.signatures import FIGURES, SIGNATURES

pytestmark = pytest.mark.gpu


def test_loads_have_their_signatures(tmp_path: Path) -> None:
    """Those of this project's kernel depend on the card; the trap must be far below them."""
    try:
        find_sources(None)
    except SglangMissingError as missing:
        pytest.skip(str(missing))
    memory: dict[str, float] = {}
    for load in known_loads():
        recording = tmp_path / f"{load.name}.json"
        observe(load, recording, Seconds(watched=2.0), 0.25)
        figures = {name: statistics.median(of) for name, of in published(recording).items()}
        memory[load.name] = figures["dram_active_ratio"]
        if load.name.startswith("longleaf"):
            continue
        for name, (least, most) in zip(FIGURES, SIGNATURES[load.name], strict=True):
            assert least <= figures[name] <= most, (load.name, name, figures)
    assert memory["longleaf-verify-64k"] > 50 * memory["sglang-verify-64k"]
