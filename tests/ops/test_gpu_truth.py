"""What the run of the GPU exporter beside known loads is reported as."""

import json
from pathlib import Path
from typing import Any

import pytest

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
