"""verify_mla without a GPU: refused arguments, by name, and what it looks like to a tracer."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: make test-torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longleaf_kernels.verify import verify_mla

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fake_gpu")]


@pytest.fixture
def fake_gpu() -> Iterator[None]:
    with FakeTensorMode(), torch.device("cuda"):
        yield


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def int64(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64)


def verify(**changed: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Two requests of 65 nodes, 8 heads, over 40 cached tokens."""
    arguments: dict[str, Any] = {
        "q": bf16(130, 8, 576),
        "kv_pool": bf16(100, 576),
        "kv_indptr": int32(3),
        "kv_indices": int64(40),
        "tree_kv": bf16(130, 576),
        "visible": int64(130, 2),
        "scale": 0.1,
        "workspace": torch.empty(1 << 24, dtype=torch.uint8),
    }
    return verify_mla(**(arguments | changed))


# Tensors are made in the test, under the fake device: here only how.
REFUSED: list[tuple[str, Any, str]] = [
    ("q", lambda: torch.empty(130, 8, 576), "q must be bfloat16, got float32"),
    ("q", lambda: bf16(130, 8, 512), "q must be [T, H, 576], got [130, 8, 512]"),
    ("q", lambda: bf16(130, 129, 576), "heads must be in [1, 128], got 129"),
    ("q", lambda: bf16(131, 8, 576), "q has 131 rows, not a multiple of the 2 requests"),
    ("q", lambda: bf16(8, 130, 576).transpose(0, 1), "q must be contiguous, got strides"),
    ("q", lambda: bf16(130, 8, 576).to("meta"), "q must be on a CUDA device, got meta"),
    ("q", lambda: bf16(1026, 8, 576), "nodes must be in [1, 512], got 513"),
    ("kv_pool", lambda: torch.empty(100, 576), "kv_pool must be bfloat16 or float8_e4m3fn"),
    ("kv_pool", lambda: bf16(100, 512), "kv_pool must be [slots, 576], got [100, 512]"),
    ("kv_pool", lambda: bf16(2, 32, 576), "kv_pool must be [pages, 64, 576], got [2, 32, 576]"),
    ("kv_pool", lambda: bf16(2, 64, 576), "page_indptr goes with a pool of pages"),
    ("kv_indptr", lambda: int64(3), "kv_indptr must be int32, got int64"),
    ("kv_indptr", lambda: int32(1), "batch must be in [1, 1024], got 0"),
    ("kv_indices", lambda: int64(40, 1), "kv_indices must be [n], got [40, 1]"),
    ("kv_indices", lambda: torch.empty(40), "kv_indices must be int32 or int64, got float32"),
    ("tree_kv", lambda: bf16(129, 576), "tree_kv must be [130, 576], got [129, 576]"),
    ("visible", lambda: int64(130, 1), "visible must be [130, 2], got [130, 1]"),
    ("visible", lambda: int32(130, 2), "visible must be int64, got int32"),
    ("page_indptr", lambda: int32(3), "page_indptr goes with a pool of pages"),
    ("q_indptr", lambda: int32(3), "q_indptr needs max_nodes"),
    ("max_nodes", lambda: 64, "max_nodes is 64, q has 65 rows a request"),
    ("scale", lambda: 0.0, "scale must be positive and finite, got 0.0"),
    ("scale", lambda: float("nan"), "scale must be positive and finite, got nan"),
    ("kv_scale", lambda: 2.0, "kv_scale must be 1.0 for a bfloat16 pool, got 2.0"),
    ("workspace", lambda: torch.empty(9), "workspace must be uint8, got float32"),
    ("out", lambda: bf16(130, 8, 576), "out must be [130, 8, 512], got [130, 8, 576]"),
    ("lse", lambda: bf16(130, 8), "lse must be float32, got bfloat16"),
]


@pytest.mark.parametrize(("name", "make", "message"), REFUSED)
def test_bad_arguments_are_refused_by_name_before_any_launch(
    name: str, make: Any, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        verify(**{name: make()})


def test_results_of_a_traced_call() -> None:
    out, lse = verify()
    assert (tuple(out.shape), out.dtype, out.device.type, lse) == (
        (130, 8, 512),
        torch.bfloat16,
        "cuda",
        None,
    )
    _, lse = verify(return_lse=True)
    assert lse is not None
    assert (tuple(lse.shape), lse.dtype) == ((130, 8), torch.float32)
    pool = torch.empty(3, 64, 576, dtype=torch.float8_e4m3fn)
    paged, _ = verify(kv_pool=pool, page_indptr=int32(3), kv_scale=0.5, visible=None)
    assert paged.shape == out.shape
    ragged, _ = verify(q_indptr=int32(3), max_nodes=128)
    assert ragged.shape == out.shape


def test_the_schema_says_what_is_written() -> None:
    schema = torch.ops.longleaf.verify_mla.default._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == {"out", "lse", "workspace"}
