"""What runs of the GPU exporter and of the probes on a GPU are reported as."""

import json
from pathlib import Path
from typing import Any

import pytest

from ops.gpu.probes_report import rows_of as probe_rows
from ops.gpu.truth_report import rows_of

SAMPLES = [{"0": {"tensor_active_ratio": share, "dram_active_ratio": 0.2}} for share in (0.9, 0.94)]


def document(folder: Path, samples: list[Any], **more: Any) -> dict[str, Any]:
    supported = {"tensor_active_ratio": "", "dram_active_ratio": ""}
    source = {"source": "cupti_pm", "supported": supported, "samples": samples}
    (folder / "matmul-cupti.json").write_text(json.dumps({"sources": [source]}))
    seen = {
        "recording": "matmul-cupti.json",
        "unit": "FLOP/s",
        "alone": [6.0e14, 6.2e14],
        "watched": 6.039e14,
        "cpu_share": 0.04,
    }
    return {"observed": [{**seen, **more}]}


def test_figures_are_medians_and_watching_costs_a_share_of_both_times_alone(tmp_path: Path) -> None:
    rows = {row.name: row for row in rows_of(tmp_path, document(tmp_path, SAMPLES))}
    assert rows["matmul_cupti_tensor_active_ratio"].value == pytest.approx(0.92)
    assert rows["matmul_cupti_tensor_active_ratio"].n == 2
    assert rows["matmul_cupti_rate"].value == pytest.approx(610)
    assert rows["matmul_cupti_slowdown"].value == pytest.approx(1.0)
    assert rows["matmul_cupti_exporter_cpu"].value == pytest.approx(4.0)
    assert "matmul_cupti_power" not in rows


def test_what_was_lost_is_a_row_that_says_why(tmp_path: Path) -> None:
    lost = document(
        tmp_path, [SAMPLES[0], "decode: unknown"], untold={"cpu": "the source was lost"}
    )
    rows = {row.name: row for row in rows_of(tmp_path, lost)}
    for name in ("tensor", "dram"):
        row = rows[f"matmul_cupti_{name}_active_ratio"]
        assert (row.value, row.why) == (None, "decode: unknown, after 1 sample")
    assert rows["matmul_cupti_exporter_cpu"].why == "the source was lost"


def test_probes_are_reported_by_phase_context_and_text(tmp_path: Path) -> None:
    samples = {"tensor_active_ratio": [0.03, 0.05], "power_watts": [200.0, 220.0]}
    phase = {"name": "decode", "gpus": {"0": {"samples": samples}}, "step_seconds": 5.5e-3}
    for server in ("ours", "stock"):
        (tmp_path / f"gpu-{server}.json").write_text(json.dumps({"phases": [phase]}))
    cells = [
        {"context": 1024, "samples": [5.4e-3, 5.6e-3], "why": ""},
        {"context": 16_384, "samples": [], "why": "status 400"},
    ]
    step = {"engines": [{"cells": cells}, {"cells": cells}]}
    (tmp_path / "step.json").write_text(json.dumps(step))
    cell = {"text": "code", "context": 160, "samples": [3.0, 5.0], "why": ""}
    (tmp_path / "commit.json").write_text(json.dumps({"cells": [cell]}))
    rows = {row.name: row for row in probe_rows(tmp_path)}
    assert rows["gpu_ours_decode_tensor_active_ratio"].value == pytest.approx(0.04)
    assert rows["gpu_ours_decode_power_watts"].unit == "W"
    assert rows["gpu_stock_decode_dram_active_ratio"].why == "not told"
    assert rows["gpu_stock_decode_step_ms"].value == pytest.approx(5.5)
    assert rows["step_ours_1k_ms"].spread == pytest.approx((5.45, 5.55))
    assert (rows["step_stock_16k_ms"].value, rows["step_stock_16k_ms"].why) == (None, "status 400")
    assert (rows["commit_tiny_code_160"].value, rows["commit_tiny_code_160"].n) == (4.0, 2)
