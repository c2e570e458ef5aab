"""The benchmark's arithmetic, inputs and contenders, as far as they go without a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: make test-torch")

import torch

from kernel_bench.cases import BARS, Problem, grid, problems
from kernel_bench.inputs import make_inputs, random_tree
from kernel_bench.machine import Gpu
from kernel_bench.rows import OURS, SPLITKV, TRITON, Measured, quotient, rows
from kernel_bench.sglang import (
    SglangMissingError,
    find_sources,
    full_mask,
    max_kv_splits,
)
from kernel_bench.splitkv_plan import Shape, Split, plan
from kernel_bench.timing import Sample

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def sample(value: float) -> Sample:
    return Sample(value, (value * 0.9, value * 1.1), 5)


def test_without_measurements_every_named_row_is_null_and_says_why() -> None:
    missing = Measured(missing={TRITON: "no sglang installed", "mma": "no nvcc"})
    found = {row.name: row for row in rows(missing)}
    for bar in BARS:
        assert found[bar.name].value is None
        assert (found[bar.name].bar, found[bar.name].stretch) == (bar.bar, bar.stretch)
        assert (found[bar.name].why or "").startswith("not measured: ")
    assert found["verify_n9_185k_x_triton"].why == "not measured: no sglang installed"
    assert found["verify_n32_185k_mma_share"].why == "not measured: no nvcc"


def test_rows_of_measurements() -> None:
    measured = Measured(copy=sample(4e12), mma=sample(6e14))
    for name in problems():
        measured.times[OURS, name] = sample(100.0)
        measured.times[TRITON, name] = sample(2500.0)
    measured.times[SPLITKV, "verify_n9_185k"] = sample(210.0)
    measured.times[OURS, "verify_n9_185k_fp8"] = sample(60.0)
    measured.times[OURS, "verify_b32_mixed"] = sample(700.0)
    measured.steps["build_tree_us"] = sample(30.0)
    points = list(grid())
    measured.grid = {
        points[0]: (sample(10.0), sample(30.0)),
        points[9]: (sample(10.0), sample(9.0)),
    }
    found = {row.name: row for row in rows(measured)}

    def value(name: str) -> float:
        got = found[name].value
        assert got is not None, name
        return got

    assert value("verify_n9_185k_bf16_copy_share") == pytest.approx(0.5328, abs=1e-4)
    assert value("verify_n9_185k_gb_s") == pytest.approx(2131.2)
    assert value("verify_n9_185k_x_triton") == 25.0
    assert value("verify_n9_185k_x_splitkv") == 2.1
    assert value("verify_n9_185k_fp8_speedup") == pytest.approx(1.6667)
    assert value("verify_n64_64k_mma_share") == pytest.approx(
        65_536 * 512 * 2176 / 1e-4 / 6e14, rel=1e-4
    )
    tokens = problems()["verify_b32_mixed"].tokens
    assert value("verify_b32_mixed_efficiency") == pytest.approx(tokens / 185_000 / 7, rel=1e-4)
    assert value("grid_min_ratio_vs_triton") == 0.9
    assert found["grid_min_ratio_vs_triton"].n == 2
    assert found["grid_min_ratio_vs_triton"].met is False
    assert found["build_tree_us"].met is True
    assert found["compact_kv_us"].value is None


def test_a_quotient_s_spread_is_the_worst_of_both_sides() -> None:
    found = quotient(Sample(20.0, (18.0, 22.0), 5), Sample(10.0, (9.0, 11.0), 20))
    assert found == Sample(2.0, (18 / 11, 22 / 9), 5)


def test_median_and_quartiles() -> None:
    assert Sample.of([5.0]) == Sample(5.0, (5.0, 5.0), 1)
    assert Sample.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Sample(3.0, (2.0, 4.0), 5)
    assert Sample(4.0, (2.0, 8.0), 3).map(lambda x: 1 / x) == Sample(0.25, (0.125, 0.5), 3)


def test_inputs_are_what_the_operators_take() -> None:
    inputs = make_inputs(Problem((300, 0, 5), 9), CPU, slots=400)
    assert inputs.q.shape == (27, 8, 576)
    assert inputs.indptr.tolist() == [0, 300, 300, 305]
    used = torch.cat([inputs.indices, inputs.spare_slots]).tolist()
    assert len(set(used)) == 308
    assert max(used) < 400
    bits = (inputs.visible[:9] >> torch.arange(9)) & 1
    assert torch.equal(bits.bool(), inputs.dense)
    assert torch.equal(inputs.visible[:9], inputs.visible[18:])


def test_a_tree_s_nodes_see_their_ancestors_only() -> None:
    seen = random_tree(30)
    assert seen.diagonal().all()
    assert seen[:, 0].all()
    assert not seen.triu(1).any()
    for node in range(30):
        for ancestor in seen[node].nonzero().flatten().tolist():
            assert (seen[node] | ~seen[ancestor]).all()
    assert torch.equal(random_tree(4, causal=True), torch.ones(4, 4).tril().bool())


def test_sglang_s_mask_has_the_tree_behind_each_prefix() -> None:
    inputs = make_inputs(Problem((7, 2), 3), CPU, slots=20)
    mask, starts = full_mask(inputs)
    assert starts.tolist() == [0, 30, 45]
    first, second = mask[:30].view(3, 10), mask[30:].view(3, 5)
    assert first[:, :7].all()
    assert torch.equal(first[:, 7:], inputs.dense)
    assert torch.equal(second[:, 2:], inputs.dense)


def test_sglang_s_bound_of_splits() -> None:
    assert max_kv_splits(132) == 256
    assert max_kv_splits(188) == 256
    assert max_kv_splits(1) == 8


def test_missing_sglang_sources_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SglangMissingError, match=r"extend_attention.py under"):
        find_sources(str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SglangMissingError, match="sglang is not installed"):
        find_sources(None)


def test_sglang_is_found_in_an_unpacked_wheel(tmp_path: Path) -> None:
    attention = tmp_path / "sglang/kernels/ops/attention"
    attention.mkdir(parents=True)
    (attention / "extend_attention.py").touch()
    assert find_sources(str(tmp_path)) == tmp_path / "sglang"
    assert find_sources(str(tmp_path / "sglang")) == tmp_path / "sglang"


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_a_gpu_s_short_name(name: str, slug: str) -> None:
    assert Gpu(name, None).slug == slug


def test_pieces_of_the_plain_split_kv_kernel_fill_the_processors_once() -> None:
    assert plan(72, 1, 132, Shape(64, 32, 8, 2)) == Split(2, 65)
    assert plan(72, 1, 132, Shape(16, 32, 4, 2, waves=2)) == Split(5, 51)
    assert plan(512, 32, 132, Shape(16, 32, 4, 2)) == Split(32, 1)
