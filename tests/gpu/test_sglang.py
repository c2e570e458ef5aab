"""verify_mla against SGLang's own Triton kernels on the same tensors."""

import os

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from kernel_bench.cases import Problem
from kernel_bench.inputs import Inputs, make_inputs
from kernel_bench.longleaf import Longleaf
from kernel_bench.sglang import SglangKernels, SglangMissingError
from kernel_bench.splitkv import SplitKv
from kernel_bench.splitkv_plan import Shape
from tests.gpu.verify_cases import relative_error

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
TWO_ROUNDINGS = 8e-3
"""Both sides round the weights and the result to bfloat16, in different orders."""


@pytest.fixture(scope="module")
def sglang() -> SglangKernels:
    try:
        return SglangKernels.load(os.environ.get("SGLANG_SRC"))
    except SglangMissingError as missing:
        pytest.skip(f"needs SGLang's sources: {missing}")


def draw(problem: Problem) -> tuple[Inputs, torch.Tensor]:
    """Inputs and a pool. Slots that no prefix uses hold NaN, but for decode's new tokens."""
    slots = problem.tokens + problem.batch + 100
    inputs = make_inputs(problem, DEVICE, slots)
    pool = torch.full((slots, 576), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    pool[inputs.indices] = torch.randn(problem.tokens, 576, device=DEVICE).bfloat16()
    pool[inputs.spare_slots] = inputs.tree_kv[:: problem.nodes]
    return inputs, pool


@pytest.mark.parametrize("nodes", [2, 9, 17, 32, 64])
@pytest.mark.parametrize("prefixes", [(0,), (1,), (1025,), (20_000,), (4097, 3, 0, 700)], ids=str)
def test_tree_verify(sglang: SglangKernels, prefixes: tuple[int, ...], nodes: int) -> None:
    compare(sglang, Problem(prefixes, nodes))


@pytest.mark.parametrize("nodes", [1, 16, 63, 200])
def test_causal_extend(sglang: SglangKernels, nodes: int) -> None:
    compare(sglang, Problem((3000, 5), nodes, causal=True))


@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("prefixes", [(0,), (1,), (1025,), (65_536,), (4097, 3, 0, 700)], ids=str)
def test_decode(sglang: SglangKernels, prefixes: tuple[int, ...], heads: int) -> None:
    compare(sglang, Problem(prefixes, 1, heads))


@pytest.mark.parametrize("problem", [Problem((1025, 0), 9), Problem((300,), 70, causal=True)])
def test_the_plain_split_kv_kernel_agrees(problem: Problem) -> None:
    inputs, pool = draw(problem)
    Longleaf.on(inputs).prepare(inputs)(pool)
    expected = inputs.out.clone()
    inputs.out.fill_(float("nan"))
    SplitKv(Shape(32, 16, 4, 2), processors=16).prepare(inputs)(pool)
    assert relative_error(inputs.out, expected.float()) < TWO_ROUNDINGS


def compare(sglang: SglangKernels, problem: Problem) -> None:
    inputs, pool = draw(problem)
    inputs.out.fill_(float("nan"))
    sglang.prepare(inputs)(pool)
    theirs = inputs.out.float()
    inputs.out.fill_(float("nan"))
    Longleaf.on(inputs).prepare(inputs)(pool)
    assert relative_error(inputs.out, theirs) < TWO_ROUNDINGS
