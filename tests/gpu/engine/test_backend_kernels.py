"""What longleaf_mla adds to verify_mla, on a GPU: the plan, the prefill kernels, the buffers."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from longleaf.engine import extend
from longleaf.engine.metadata import GraphPlans, plan_prefix
from longleaf_kernels.verify import verify_workspace
from tests.engine.varlen import plain_varlen

PLAIN_TOLERANCE = 2e-2
"""bfloat16 outputs of order 1: two units in the last place."""


@pytest.mark.parametrize("length_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("rows", "shorter"), [(4, 0), (3, 1), (0, 0)])
def test_the_plan_on_the_gpu_is_the_plan_on_the_cpu(
    rows: int, shorter: int, length_dtype: torch.dtype
) -> None:
    table = torch.randint(0, 1 << 20, (6, 190_000), dtype=torch.int32)
    pool_indices = torch.tensor([3, 0, 5, 1])
    lengths = torch.tensor([185_000, 1, 0, 70_001], dtype=length_dtype)
    results = []
    for device in ("cpu", "cuda"):
        pointers = torch.full((5,), -7, dtype=torch.int32, device=device)
        slots = torch.full((300_000,), -7, dtype=torch.int32, device=device)
        plan_prefix(
            pointers,
            slots,
            table.to(device),
            pool_indices.to(device),
            lengths.to(device),
            rows=rows,
            shorter=shorter,
        )
        results.append((pointers.cpu(), slots.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kernel", ["torch", "fa3"])
@pytest.mark.parametrize(("width", "value_width"), [(192, 128), (96, 32)])
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_kernels_agree_with_plain_attention(
    monkeypatch: pytest.MonkeyPatch, kernel: str, width: int, value_width: int, causal: bool
) -> None:
    """Packed requests, one of them without keys; values as strided views, as SGLang gives them."""
    if kernel == "fa3":
        pytest.importorskip("sgl_kernel.flash_ops", reason="needs sgl_kernel's FlashAttention 3")
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("FlashAttention 3 needs sm_90")
    monkeypatch.setenv(extend.KERNEL_VARIABLE, kernel)
    attention = extend.chosen_varlen()
    heads = 8
    lengths_q = [300, 1, 70]
    lengths_k = lengths_q if causal else [1000, 0, 129]
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(rows: int, columns: int) -> Any:
        shape = (rows, heads, columns)
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    q = normal(sum(lengths_q), width)
    kv = normal(sum(lengths_k), width + value_width)
    k, v = kv[..., :width].contiguous(), kv[..., width:]

    def pointers(lengths: list[int]) -> Any:
        return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device="cuda").int()

    arguments = (pointers(lengths_q), pointers(lengths_k), max(lengths_q), max(lengths_k))
    scale = width**-0.5
    out, lse = attention(q, k, v, *arguments, scale=scale, causal=causal)
    plain, plain_lse = plain_varlen(
        q.double(), k.double(), v.double(), *arguments, scale=scale, causal=causal
    )
    assert out.shape == (sum(lengths_q), heads, value_width)
    assert out.is_contiguous()
    assert torch.allclose(out.double(), plain, atol=PLAIN_TOLERANCE, rtol=0)
    assert torch.equal(lse.isinf(), plain_lse.isinf())
    seen = ~plain_lse.isinf()
    assert torch.allclose(lse.double()[seen], plain_lse[seen], atol=1e-2, rtol=0)


def test_the_backends_own_buffers_stay_below_32_mb() -> None:
    graphs = GraphPlans(context=262_144 + 64, device="cuda")
    for nodes in (32, 16, 8, 1):
        graphs.reserve(8, 8 * nodes)
    assert graphs.nbytes + verify_workspace("cuda").nbytes <= 32 << 20
