"""verify_mla without a GPU: refused arguments, by name, and what it looks like to a tracer."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: make test-torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longleaf_kernels.verify import (
    WorkSplit,
    check_lengths_on_device,
    verify_mla,
)

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def fake_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if "real" in request.fixturenames:
        yield
        return
    with FakeTensorMode(), torch.device("cuda"):
        yield


@pytest.fixture
def real() -> None:
    """Tensors of the CPU instead of fake ones of a GPU."""


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
    ("q", lambda: bf16(0, 8, 576), "q must have at least one row, got 0"),
    ("q", lambda: [1], "q must be a tensor, got list"),
    ("q", lambda: bf16(130, 8, 576).requires_grad_(), "q requires grad, which the kernels do not"),
    ("q", lambda: bf16(1026, 8, 576), "nodes must be in [1, 512], got 513"),
    ("kv_pool", lambda: torch.empty(100, 576), "kv_pool must be bfloat16 or float8_e4m3fn"),
    ("kv_pool", lambda: bf16(100, 512), "kv_pool must be [slots, 576], got [100, 512]"),
    ("kv_pool", lambda: bf16(2, 32, 576), "kv_pool must be [pages, 64, 576], got [2, 32, 576]"),
    ("kv_pool", lambda: bf16(2, 64, 576), "page_indptr goes with a pool of pages"),
    ("kv_pool", lambda: bf16(0, 576), "kv_pool must have at least one slot, got 0"),
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
    ("scale", lambda: 0.0, "scale must be positive and finite in float32, got 0.0"),
    ("scale", lambda: float("nan"), "scale must be positive and finite in float32, got nan"),
    ("scale", lambda: 1e39, "scale must be positive and finite in float32, got 1e+39"),
    ("scale", lambda: 1e-60, "scale must be positive and finite in float32, got 1e-60"),
    ("scale", lambda: None, "scale must be a number, got NoneType"),
    ("scale", lambda: torch.empty(()), "scale must be a number, got FakeTensor"),
    ("kv_scale", lambda: 1e-50, "kv_scale must be positive and finite in float32, got 1e-50"),
    ("kv_scale", lambda: 2.0, "kv_scale must be 1.0 for a bfloat16 pool, got 2.0"),
    ("workspace", lambda: torch.empty(9), "workspace must be uint8, got float32"),
    ("workspace", lambda: None, "workspace must be of verify_workspace, got NoneType"),
    ("split", lambda: (1, 1, 1), "split must be a WorkSplit, got tuple"),
    ("split", lambda: WorkSplit(row_groups=6), "row_groups must be in [0, 5], got 6"),
    ("split", lambda: WorkSplit(gang=-1), "gang must be in [0, 2147483647], got -1"),
    ("split", lambda: WorkSplit(min_tiles=2**31), "min_tiles must be in [0, 2147483647]"),
    ("split", lambda: WorkSplit(gang=1.5), "gang must be an integer, got float"),  # type: ignore[arg-type]
    ("out", lambda: bf16(130, 8, 576), "out must be [130, 8, 512], got [130, 8, 576]"),
    ("lse", lambda: bf16(130, 8), "lse must be float32, got bfloat16"),
]


@pytest.mark.parametrize(("name", "make", "message"), REFUSED)
def test_bad_arguments_are_refused_by_name_before_any_launch(
    name: str, make: Any, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        verify(**{name: make()})


@pytest.mark.parametrize(
    ("most", "message"),
    [
        (65.5, "max_nodes must be an integer, got float"),
        (0, "max_nodes must be in [1, 512], got 0"),
        (513, "max_nodes must be in [1, 512], got 513"),
        (64, "have between 64 and 128 rows, q has 130"),
        (131, "have between 131 and 262 rows, q has 130"),
    ],
)
def test_sizes_of_requests_that_cannot_be(most: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        verify(q_indptr=int32(3), max_nodes=most)


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


@pytest.mark.usefixtures("real")
def test_importing_the_package_registers_the_operator() -> None:
    """In a process of its own: the tests import the module itself."""
    code = (
        "import torch, longleaf_kernels as k; "
        "print(hasattr(torch.ops.longleaf, 'verify_mla'), k.verify_mla.__name__, "
        "k.verify_workspace.__name__, k.WorkSplit.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "verify_mla", "verify_workspace", "WorkSplit"]


def operands(**changed: object) -> list[Any]:
    """What `torch.ops.longleaf.verify_mla` takes, in order, on the CPU."""
    arguments: dict[str, Any] = {
        "q": bf16(18, 8, 576),
        "kv_pool": bf16(100, 576),
        "kv_indptr": int32(3),
        "kv_indices": int64(40),
        "tree_kv": bf16(18, 576),
        "visible": int64(18, 1),
        "q_indptr": None,
        "page_indptr": None,
        "out": bf16(18, 8, 512),
        "lse": None,
        "workspace": torch.empty(1 << 24, dtype=torch.uint8),
        "nodes": 9,
        "scale": 0.1,
        "kv_scale": 1.0,
        "row_groups": 0,
        "gang": 0,
        "min_tiles": 0,
    }
    return list((arguments | changed).values())


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("q", lambda: bf16(18 * 8 * 576 + 1)[1:].view(18, 8, 576), "q must start on 16 bytes"),
        ("kv_pool", lambda: bf16(57601)[1:].view(100, 576), "kv_pool must start on 16 bytes"),
        ("out", lambda: bf16(18 * 4096 + 1)[1:].view(18, 8, 512), "out must start on 16 bytes"),
        ("visible", lambda: int32(18, 1), "visible must be int64, got int32"),
        ("tree_kv", lambda: bf16(17, 576), "tree_kv must be [18, 576], got [17, 576]"),
        ("kv_indices", lambda: int64(40).short(), "kv_indices must be int32 or int64, got int16"),
        ("nodes", lambda: 8, "max_nodes is 8, q has 9 rows a request"),
        ("gang", lambda: -3, "gang must be in [0, 2147483647], got -3"),
        ("scale", lambda: -1.0, "scale must be positive and finite in float32, got -1.0"),
        ("kv_scale", lambda: 0.5, "kv_scale must be 1.0 for a bfloat16 pool, got 0.5"),
    ],
)
def test_the_operator_itself_refuses_them_too(
    name: str, make: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longleaf_kernels.verify.check_cuda", lambda _, tensor: tensor.device)
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        torch.ops.longleaf.verify_mla(*operands(**{name: make()}))


@pytest.mark.usefixtures("real")
def test_outputs_that_overlap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longleaf_kernels.verify.check_cuda", lambda _, tensor: tensor.device)
    q, workspace = bf16(18, 8, 576), torch.empty(1 << 24, dtype=torch.uint8)
    inside = q.view(-1)[: 18 * 8 * 512].view(18, 8, 512)
    with pytest.raises(ValueError, match="out must not overlap q in memory"):
        torch.ops.longleaf.verify_mla(*operands(q=q, out=inside))
    lse = workspace[: 18 * 8 * 4].view(torch.float32).view(18, 8)
    with pytest.raises(ValueError, match="workspace must not overlap lse in memory"):
        torch.ops.longleaf.verify_mla(*operands(lse=lse, workspace=workspace))


def lengths(**changed: object) -> None:
    """Requests of 5 and 3 cached tokens and 2 and 4 nodes, in a pool of 100 slots."""
    arguments: dict[str, Any] = {
        "kv_pool": bf16(100, 576),
        "kv_indptr": [0, 5, 8],
        "kv_indices": list(range(92, 100)),
        "q_indptr": [0, 2, 6],
        "page_indptr": None,
        "tokens": 6,
        "max_nodes": 4,
    }
    arguments |= changed
    for name in ("kv_indptr", "kv_indices", "q_indptr", "page_indptr"):
        if arguments[name] is not None:
            arguments[name] = torch.tensor(arguments[name], dtype=torch.int32)
    check_lengths_on_device(**arguments)


@pytest.mark.usefixtures("real")
def test_lengths_that_are_read_back() -> None:
    lengths()
    lengths(q_indptr=None)
    lengths(kv_pool=bf16(2, 64, 576), page_indptr=[0, 1, 2], kv_indices=[1, 0])
    for changed, message in (
        ({"kv_indptr": [0, 5, 4]}, "kv_indptr must start at 0 and not decrease, got [0, 5, 4]"),
        ({"kv_indptr": [-1, 5, 8]}, "kv_indptr must start at 0 and not decrease"),
        ({"kv_indptr": [0, 5, 9]}, "kv_indptr ends at 9, there are 8 entries of kv_indices"),
        ({"q_indptr": [0, 2, 7]}, "q_indptr ends at 7, there are 6 rows of q"),
        ({"q_indptr": [0, 0, 6]}, "q_indptr has a request of 6 nodes, max_nodes is 4"),
        ({"kv_indices": [100, *range(7)]}, "kv_indices must be in [0, 99], got 100"),
        ({"kv_indices": [*range(7), -1]}, "kv_indices must be in [0, 99], got -1"),
        (
            {"kv_pool": bf16(2, 64, 576), "page_indptr": [0, 1, 1], "kv_indices": [1, 0]},
            "page_indptr gives request 1 0 pages for 3 tokens",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            lengths(**changed)


class Verify(torch.nn.Module):  # type: ignore[misc]  # Any where torch is not installed
    """A layer's attention, as a model would call it."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        *operands, workspace = tensors
        return verify_mla(*operands, scale=0.1, workspace=workspace, return_lse=True)


@pytest.mark.usefixtures("real")
def test_it_exports_with_free_sizes_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longleaf_kernels.verify.check_cuda", lambda _, tensor: tensor.device)
    example = (
        *(bf16(18, 8, 576), bf16(100, 576), int32(3), int64(40), bf16(18, 576), int64(18, 1)),
        torch.empty(2000, dtype=torch.uint8),
    )
    batch = torch.export.Dim("batch", min=2, max=64)
    rows, slots, entries = {0: 9 * batch}, torch.export.Dim("slots"), torch.export.Dim("entries")
    sizes = (rows, {0: slots}, {0: batch + 1}, {0: entries}, rows, rows, None)
    program = torch.export.export(Verify(), example, dynamic_shapes=(sizes,))
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [call for call in calls if "longleaf" in call] == ["longleaf.verify_mla.default"]
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return lambda *inputs: (example[0].new_empty(18, 8, 512), torch.empty(18, 8))

    torch.compile(Verify(), fullgraph=True, backend=backend)(*example)
    assert [name for name in found if "longleaf" in name] == ["longleaf.verify_mla.default"]
