"""The GPU exporter, as a process of its own, beside loads whose figures are known."""

import json
import statistics
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kernel_bench.sglang import SglangMissingError, find_sources
from longleaf.exporters.cupti import COUNTERS, CuptiPm
from ops.gpu.known_loads import copy, known_loads, matmul
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


def test_cupti_alone_tells_a_product_from_a_copy_in_every_sample(tmp_path: Path) -> None:
    device = torch.device("cuda")
    for load in (matmul(device), copy(device)):
        recording = tmp_path / f"{load.name}.json"
        seconds = Seconds(settle=0.3, alone=0.3, watched=4.0)
        observe(load, recording, seconds, 0.25, "--source", CuptiPm.name)
        (source,) = json.loads(recording.read_text())["sources"]
        if "error" in source:
            pytest.skip(source["error"])
        figures = published(recording)
        for name, (least, most) in zip(FIGURES, SIGNATURES[load.name], strict=True):
            if name in COUNTERS:
                assert len(figures[name]) == len(source["samples"]) > 4, source["samples"]
                assert least <= statistics.median(figures[name]) <= most, (load.name, name)
