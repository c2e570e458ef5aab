"""The benchmark's table and the prediction for sm_120: what needs no torch."""

import json
from pathlib import Path

import pytest

from kernel_bench.cases import BARS, Problem, grid, grid_row, log_uniform, problems
from kernel_bench.predict import (
    BANDWIDTHS,
    BOOST,
    H200,
    README,
    RESOURCES,
    ROWS,
    Calibration,
    Work,
    calibrate,
    predict,
    table,
    tensor_cycles,
)
from kernel_bench.roofline import points
from ops.bench.results import Row, format_table, write_results

NAMED = [
    "verify_n9_185k_bf16_copy_share",
    "verify_n9_185k_x_triton",
    "verify_n9_185k_x_splitkv",
    "verify_n9_16k_x_triton",
    "verify_n9_1k_us",
    "verify_n9_1k_x_triton",
    "verify_n32_185k_mma_share",
    "verify_n64_64k_mma_share",
    "decode_64k_copy_share",
    "decode_185k_copy_share",
    "verify_n9_185k_fp8_speedup",
    "verify_b32_mixed_efficiency",
    "verify_h64_b4_64k_mma_share",
    "decode_64k_x_triton",
    "extend16_32k_x_triton",
    "grid_min_ratio_vs_triton",
    "build_tree_us",
    "compact_kv_us",
]


def test_every_row_that_is_owed_has_a_bar() -> None:
    assert [bar.name for bar in BARS] == NAMED
    assert {bar.name for bar in BARS if bar.better == "lower"} == {
        "verify_n9_1k_us",
        "build_tree_us",
        "compact_kv_us",
    }
    for bar in BARS:
        if bar.stretch is not None:
            assert (bar.stretch > bar.bar) == (bar.better == "higher"), bar.name


def test_a_launch_s_work_is_that_of_the_documented_floors() -> None:
    long = problems()["verify_n9_185k"]
    assert 61 * long.bytes == pytest.approx(13.0e9, rel=2e-3)
    assert 61 * long.flops / 504e12 == pytest.approx(3.5e-3, rel=0.02)
    assert long.flops / long.bytes == pytest.approx(136, abs=0.1)
    assert problems()["verify_n9_185k_fp8"].bytes == long.bytes / 2


def test_mixed_lengths_are_log_uniform_from_end_to_end() -> None:
    lengths = log_uniform(32, 1000, 185_000)
    assert len(lengths) == 32
    assert (min(lengths), max(lengths)) == (1000, 185_000)
    ratios = [b / a for a, b in zip(sorted(lengths), sorted(lengths)[1:], strict=False)]
    assert max(ratios) == pytest.approx(min(ratios), rel=2e-3)
    assert problems()["verify_b32_mixed"].prefixes == lengths


def test_the_grid_spans_what_the_bar_names() -> None:
    every = list(grid())
    assert {p.prefixes[0] for p in every} >= {0, 200_000}
    assert {p.nodes for p in every} >= {1, 64}
    assert {p.batch for p in every} >= {1, 32}
    assert len({grid_row(p) for p in every}) == len(every)


def test_results_are_written_in_the_house_s_format(tmp_path: Path) -> None:
    rows = [
        Row("a_us", 9.8, "us", 12, "lower", 20, (9.6, 10.4), stretch=9),
        Row("b", None, "ratio", 2.0, n=0, why="not measured: no GPU"),
    ]
    path = write_results(
        "kernels",
        "make bench-kernels",
        rows,
        gpu="NVIDIA H200",
        slug="h200",
        driver="580.1",
        commit="abc",
        directory=tmp_path,
    )
    assert path.name == "kernels-h200.json"
    document = json.loads(path.read_text())
    assert document["commit"] == "abc"
    assert (document["machine"]["gpu"], document["machine"]["driver"]) == ("NVIDIA H200", "580.1")
    assert document["rows"][0]["spread"] == [9.6, 10.4]
    assert document["rows"][1]["value"] is None
    assert document["rows"][1]["why"] == "not measured: no GPU"
    text = format_table(rows)
    assert "met (stretch 9)" in text
    assert "not measured: no GPU" in text


def test_points_of_the_roofline() -> None:
    values = {"verify_n9_185k_us": 100.0, "verify_n9_0_us": 9.0, "decode_64k_us": None}
    (point,) = points(values, "")
    assert point.intensity == pytest.approx(136, abs=0.1)
    assert point.rate == pytest.approx(185_000 * 72 * 2176 / 1e-4)
    assert points(values, "_sglang") == []


class TestPrediction:
    def test_products_of_a_tile(self) -> None:
        # 40 rows x 16 tokens x 2,176 operations at 1,024 a clock.
        assert tensor_cycles(5, BOOST) == pytest.approx(40 * 16 * 2176 / 1024)
        assert tensor_cycles(5, H200) == pytest.approx(568, abs=1)

    def test_work_is_divided_as_the_kernel_divides_it(self) -> None:
        work = Work.of(problems()["verify_n9_185k"], 188)
        assert (work.groups, work.row_tiles, work.gangs) == (5, 2, 94)
        assert work.tiles == 124  # 11,563 tiles over 94 gangs
        assert Work.of(problems()["decode_64k"], 188).gangs == 188

    def test_memory_bound_rows_end_above_the_memory_floor(self) -> None:
        problem = problems()["verify_n9_185k"]
        found = predict(problem, 1792e9, Calibration(900.0, 10.0))
        assert found.floor_us == pytest.approx(185_000 * 1152 / 1792e3)
        fixed = 10.0 * H200.clock / BOOST.clock
        assert found.best_us == pytest.approx(fixed + found.floor_us / 0.92, rel=0.01)
        assert found.tensor < found.dram

    def test_tensor_bound_rows_depend_on_what_hides(self) -> None:
        problem = problems()["verify_n64_64k"]
        found = predict(problem, 1792e9, Calibration(1000.0, 10.0))
        assert found.floor_us == pytest.approx(problem.flops / 504e6)
        assert found.dram < found.tensor
        assert found.floor_us < found.best_us < found.worst_us

    def test_calibration_recovers_cycles_and_the_rest(self) -> None:
        tiles = {
            name: Work.of(problems()[name], H200.processors).tiles
            for name in ("verify_n9_64k", "verify_n9_185k", "verify_n32_185k")
        }
        microseconds = 1000 / H200.clock * 1e6
        values = {f"{name}_us": 12.0 + microseconds * count for name, count in tiles.items()}
        for name in tiles:
            found = calibrate(name, values)
            assert found.cycles == pytest.approx(1000)
            assert found.fixed_us == pytest.approx(12.0)
        assert calibrate("decode_64k", values) == Calibration(None, 0.0)

    def test_the_table_has_every_row_without_measurements_too(self) -> None:
        text = table(json.loads(RESOURCES.read_text()), {})
        for name in ROWS:
            assert f"| {name} |" in text
        assert len(BANDWIDTHS) == 2

    def test_the_readme_says_that_it_is_predicted(self) -> None:
        text = README.read_text()
        assert "predicted, sm_120a" in text


def test_a_problem_s_name_tells_it_apart() -> None:
    names = [problem.name for problem in problems().values()]
    assert len(set(names)) == len(names)
    assert Problem((5, 5), 2).tokens == 10
