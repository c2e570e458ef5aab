"""The operators without a GPU: refused arguments, by name, and what they look like to a tracer."""

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: make test-torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import longleaf_kernels
from longleaf_kernels import SamplingTensors
from longleaf_kernels._library import BAD_ARGUMENT, KernelError, Library
from longleaf_kernels._tree import (
    _BuildTreeArgs,
    _ExpandTreeArgs,
    launch_build_tree,
    launch_expand_tree,
    workspace_bytes,
)
from longleaf_kernels.accept import (
    _AcceptSampledArgs,
    _Walk,
    launch_accept_greedy,
    launch_accept_sampled,
)
from longleaf_kernels.compact import CompactPlan, _CompactArgs, launch_compact_kv

pytestmark = pytest.mark.torch


class NoLibrary(Library):
    """Stands where the library would: any call of it would fail on the missing functions."""

    def __init__(self) -> None:
        pass


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def integers(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int64)


def small(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


def build(**changed: object) -> object:
    arguments: dict[str, Any] = {
        "logits": zeros(2, 7, 100),
        "root_tokens": integers(2),
        "prefix_lens": integers(2),
        "workspace": zeros(1 << 20, dtype=torch.uint8),
        "budget": 64,
    }
    return launch_build_tree(NoLibrary(), 0, **(arguments | changed))


def expand(**changed: object) -> object:
    arguments: dict[str, Any] = {
        "tokens": integers(2, 7, 64),
        "log_probs": zeros(2, 7, 64, dtype=torch.float64),
        "root_tokens": integers(2),
        "prefix_lens": None,
        "budget": 64,
    }
    return launch_expand_tree(NoLibrary(), 0, **(arguments | changed))


def greedy(**changed: object) -> object:
    arguments: dict[str, Any] = {
        "tokens": integers(2, 9),
        "parents": small(2, 9),
        "target_tokens": integers(2, 9),
        "max_path": 8,
    }
    return launch_accept_greedy(NoLibrary(), 0, **(arguments | changed))


def sampled(**changed: object) -> object:
    arguments: dict[str, Any] = {
        "tokens": integers(2, 9),
        "parents": small(2, 9),
        "depths": small(2, 9),
        "logits": zeros(2, 9, 100),
        "sampling": SamplingTensors(zeros(2), zeros(2), small(2), zeros(2)),
        "uniforms": zeros(2, 8, dtype=torch.float64),
        "workspace": zeros(1 << 16, dtype=torch.uint8),
        "every_node": True,
    }
    return launch_accept_sampled(NoLibrary(), 0, **(arguments | changed))


def compact(**changed: object) -> object:
    arguments: dict[str, Any] = {
        "pools": [zeros(20, 576, dtype=torch.bfloat16) for _ in range(3)],
        "slots": integers(2, 9),
        "path": small(2, 8),
        "path_len": small(2),
    }
    launch_compact_kv(NoLibrary(), 0, **(arguments | changed))
    return None


def some_bytes() -> torch.Tensor:
    return zeros(1 << 20, dtype=torch.uint8)


META = torch.device("meta")
REFUSED: list[tuple[Callable[..., object], dict[str, object], str]] = [
    (build, {"logits": zeros(2, 7, 100).half()}, "logits must be float32 or bfloat16, got float16"),
    (build, {"logits": zeros(7, 100)}, "logits must be [batch, depth, vocabulary], got [7, 100]"),
    (
        build,
        {"logits": zeros(2, 100, 7).mT},
        "logits must be contiguous in its last dimension, got strides [700, 1, 7]",
    ),
    (build, {"logits": zeros(2, 16, 100)}, "depth must be in [1, 15], got 16"),
    (build, {"logits": zeros(257, 1, 2)}, "batch must be in [0, 256], got 257"),
    (build, {"logits": zeros(1, 1, 0)}, "vocabulary must be in [1, 524288], got 0"),
    (build, {"budget": 128}, "budget must be in [0, 127], got 128"),
    (build, {"budget": -1}, "budget must be in [0, 127], got -1"),
    (build, {"root_tokens": small(2)}, "root_tokens must be int64, got int32"),
    (build, {"root_tokens": integers(3)}, "root_tokens must be [2], got [3]"),
    (build, {"root_tokens": integers(2).to(META)}, "root_tokens must be on cpu, got meta"),
    (build, {"prefix_lens": integers(2, 1)}, "prefix_lens must be [2], got [2, 1]"),
    (build, {"prefix_lens": integers(4)[::2]}, "prefix_lens must be contiguous, got strides [2]"),
    (build, {"workspace": zeros(9)}, "workspace must be uint8, got float32"),
    (expand, {"tokens": small(2, 7, 64)}, "tokens must be int64, got int32"),
    (expand, {"log_probs": zeros(2, 7, 64)}, "log_probs must be float64, got float32"),
    (
        expand,
        {"log_probs": zeros(2, 7, 63, dtype=torch.float64)},
        "log_probs must be [2, 7, 64], got [2, 7, 63]",
    ),
    (expand, {"budget": 200}, "budget must be in [0, 127], got 200"),
    (greedy, {"tokens": integers(2, 129)}, "nodes must be in [1, 128], got 129"),
    (greedy, {"parents": integers(2, 9)}, "parents must be int32, got int64"),
    (greedy, {"target_tokens": integers(2, 8)}, "target_tokens must be [2, 9], got [2, 8]"),
    (greedy, {"max_path": 0}, "max_path must be in [1, 128], got 0"),
    (sampled, {"depths": integers(2, 9)}, "depths must be int32, got int64"),
    (sampled, {"logits": zeros(2, 8, 100)}, "logits must be [2, 9, vocabulary], got [2, 8, 100]"),
    (
        sampled,
        {"logits": zeros(9, 2, 100).transpose(0, 1)},
        "logits must be rows of one stride, got strides [100, 200, 1] for [2, 9, 100]",
    ),
    (sampled, {"uniforms": zeros(2, 8)}, "uniforms must be float64, got float32"),
    (
        sampled,
        {"sampling": SamplingTensors(zeros(2), zeros(2), zeros(2), zeros(2))},
        "top_k must be int32, got float32",
    ),
    (
        sampled,
        {"sampling": SamplingTensors(zeros(3), zeros(2), small(2), zeros(2))},
        "temperature must be [2], got [3]",
    ),
    (compact, {"slots": zeros(2, 9)}, "slots must be int64 or int32, got float32"),
    (compact, {"path": small(2, 10)}, "max_path must be in [1, 9], got 10"),
    (compact, {"path": small(3, 8)}, "path must be [2, max_path], got [3, 8]"),
    (compact, {"path_len": integers(2)}, "path_len must be int32, got int64"),
    (compact, {"pools": []}, "the number of pools must be in [1, 256], got 0"),
    (compact, {"pools": [zeros(20)]}, "pools must be [slots, width] or [pages, page_size, width]"),
    (compact, {"pools": [zeros(20, 8), zeros(21, 8)]}, "pools[1] must be [20, 8], got [21, 8]"),
    (compact, {"pools": [zeros(20, 8), zeros(20, 8).half()]}, "pools[1] must be float32"),
    (compact, {"pools": [zeros(20, 8), zeros(20, 16)[:, :8]]}, "pools[1] must have the strides"),
    (compact, {"pools": [zeros(20, 9)]}, "rows of a multiple of 16 bytes, got 36"),
    (compact, {"pools": [zeros(20, 9)[:, :8]]}, "lie apart by a multiple of 16 bytes, got 36"),
    (compact, {"pools": [zeros(161)[1:].view(20, 8)]}, "pools[0] must start on 16 bytes"),
    (compact, {"pools": [zeros(8, 64, 8)[::2]]}, "pages must follow each other"),
]


@pytest.mark.parametrize(("operator", "changed", "message"), REFUSED)
def test_bad_arguments_are_refused_by_name_before_any_launch(
    operator: Callable[..., object], changed: dict[str, object], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        operator(**changed)


@pytest.mark.parametrize("operator", [build, expand, greedy, sampled, compact])
def test_the_arguments_those_cases_change_are_good(operator: Callable[..., object]) -> None:
    with pytest.raises(AttributeError, match="_functions"):  # past the checks, at the library
        operator()


def test_tensors_that_are_not_on_a_gpu_are_refused() -> None:
    root, workspace = integers(1), zeros(1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="logits must be on a CUDA device, got cpu"):
        longleaf_kernels.build_tree(zeros(1, 7, 100), root, 64, workspace=workspace)
    with pytest.raises(ValueError, match="tokens must be on a CUDA device, got cpu"):
        longleaf_kernels.accept_greedy(integers(1, 9), small(1, 9), integers(1, 9))
    with pytest.raises(ValueError, match="slots must be on a CUDA device, got cpu"):
        longleaf_kernels.compact_kv([zeros(9, 8)], integers(1, 9), small(1, 8), small(1))


def test_the_library_refuses_sizes_by_itself(emulated_library: Path) -> None:
    """The C ABI has checks of its own, for callers other than this package."""
    library = Library(emulated_library)
    assert workspace_bytes(library, 1, 15, 163_840, 127) > 15 * 20 * 127 * 8
    for sizes in ((257, 7, 100, 64), (1, 16, 100, 64), (1, 7, 524_289, 64), (1, 7, 100, 101)):
        with pytest.raises(KernelError, match="build_tree takes no"):
            workspace_bytes(library, *sizes)
    with pytest.raises(KernelError, match=r"accept: an argument that no kernel .* \(status -1\)"):
        library.check(BAD_ARGUMENT, "accept")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("longleaf_build_tree", (None, None)),
        ("longleaf_expand_tree", (None, None)),
        ("longleaf_accept_greedy", (None, None, None)),
        ("longleaf_accept_sampled", (None, None)),
        ("longleaf_compact_kv", (None, None)),
    ],
)
def test_the_library_refuses_to_read_through_null(
    emulated_library: Path, name: str, arguments: tuple[None, ...]
) -> None:
    function = Library(emulated_library).function(name, *(ctypes.c_void_p for _ in arguments))
    assert function(*arguments) == BAD_ARGUMENT


def test_the_library_refuses_arguments_whose_tensors_are_missing(emulated_library: Path) -> None:
    library = Library(emulated_library)
    sizes = {"batch": 1, "depth": 7, "width": 5, "budget": 4}
    build = _BuildTreeArgs(**sizes, vocabulary=100, workspace_bytes=1 << 20, workspace=64)
    walk = _Walk(batch=1, nodes=9, max_path=8)
    sampled = _AcceptSampledArgs(walk=walk, vocabulary=100, workspace_bytes=1 << 20)
    compact = _CompactArgs(pool_count=1, row_bytes=16, row_stride=16, batch=1, nodes=2, max_path=2)
    for name, made in (
        ("longleaf_build_tree", build),
        ("longleaf_expand_tree", _ExpandTreeArgs(**sizes)),
        ("longleaf_accept_sampled", sampled),
        ("longleaf_compact_kv", compact),
    ):
        function = library.function(name, ctypes.c_void_p, ctypes.c_void_p)
        assert function(ctypes.byref(made), None) == BAD_ARGUMENT, name
        made_empty = made.walk if isinstance(made, _AcceptSampledArgs) else made
        made_empty.batch = 0
        assert function(ctypes.byref(made), None) == 0, name
    expand = library.function("longleaf_expand_tree", ctypes.c_void_p, ctypes.c_void_p)
    many = _ExpandTreeArgs(**sizes | {"batch": 257})
    assert expand(ctypes.byref(many), None) == BAD_ARGUMENT


def test_a_pool_is_compacted_once() -> None:
    pool = zeros(20, 16)
    with pytest.raises(ValueError, match="pools must be distinct"):
        CompactPlan([pool, zeros(20, 16), pool])


def sampling_of(batch: int) -> SamplingTensors:
    return SamplingTensors(
        temperature=zeros(batch), top_p=zeros(batch), top_k=small(batch), min_p=zeros(batch)
    )


@pytest.fixture
def fake_gpu() -> Iterator[None]:
    with FakeTensorMode(), torch.device("cuda"):
        yield


@pytest.mark.usefixtures("fake_gpu")
def test_shapes_of_traced_trees() -> None:
    logits = torch.empty(3, 7, 163_840, dtype=torch.bfloat16)
    root = torch.empty(3, dtype=torch.int64)
    workspace = torch.empty(1, dtype=torch.uint8)
    trees, marginals = longleaf_kernels.build_tree(logits, root, 64, workspace=workspace)
    expected = {
        "tokens": ((3, 65), torch.int64),
        "parents": ((3, 65), torch.int32),
        "depths": ((3, 65), torch.int32),
        "visible": ((3, 65, 2), torch.int64),
        "positions": ((3, 65), torch.int64),
        "log_probs": ((3, 65), torch.float64),
        "count": ((3,), torch.int32),
    }
    assert {n: (tuple(t.shape), t.dtype) for n, t in trees._asdict().items()} == expected
    assert {t.device.type for t in (*trees, *marginals)} == {"cuda"}
    assert [tuple(t.shape) for t in marginals] == [(3, 7, 64), (3, 7, 64), (3, 7)]
    again = longleaf_kernels.expand_tree(marginals.tokens, marginals.log_probs, root, 64)
    assert [t.shape for t in again] == [t.shape for t in trees]
    accepted = longleaf_kernels.accept_greedy(trees.tokens, trees.parents, trees.tokens, 8)
    assert [(tuple(t.shape), t.dtype) for t in accepted] == [
        ((3, 8), torch.int32),
        ((3,), torch.int32),
        ((3,), torch.int64),
    ]
    sampling = sampling_of(3)
    drawn = longleaf_kernels.accept_sampled(
        trees.tokens,
        trees.parents,
        trees.depths,
        torch.empty(3, 65, 163_840),
        sampling,
        torch.empty(3, 8, dtype=torch.float64),
        workspace,
    )
    assert [t.shape for t in drawn] == [t.shape for t in accepted]


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: longleaf_kernels.build_tree(
                zeros(2, 16, 9), integers(2), 8, workspace=some_bytes()
            ),
            "depth must be in [1, 15], got 16",
        ),
        (
            lambda: longleaf_kernels.build_tree(
                zeros(2, 7, 9), integers(3), 8, workspace=some_bytes()
            ),
            "root_tokens must be [2], got [3]",
        ),
        # Before a workspace is made, which would need the library.
        (
            lambda: longleaf_kernels.build_tree(zeros(7, 9), integers(2), 8),
            "logits must be [batch, depth, vocabulary], got [7, 9]",
        ),
        (
            lambda: longleaf_kernels.build_tree(zeros(1, 7, 9).requires_grad_(), integers(1), 8),
            "logits requires grad",
        ),
        (
            lambda: longleaf_kernels.top_k_marginals(zeros(1, 7, 9), 0),
            "k must be in [1, 127], got 0",
        ),
        (
            lambda: longleaf_kernels.expand_tree(integers(2, 7, 8), zeros(2, 7, 8), integers(2), 8),
            "log_probs must be float64, got float32",
        ),
        (
            lambda: longleaf_kernels.compact_kv(
                [zeros(20, 9)], integers(2, 9), small(2, 8), small(2)
            ),
            "rows of a multiple of 16 bytes, got 36",
        ),
        (
            lambda: longleaf_kernels.compact_kv(
                [zeros(20, 8)], integers(2, 9), small(2, 10), small(2)
            ),
            "max_path must be in [1, 9], got 10",
        ),
        (
            lambda: longleaf_kernels.accept_greedy(integers(2, 9), integers(2, 9), integers(2, 9)),
            "parents must be int32, got int64",
        ),
        (
            lambda: longleaf_kernels.accept_greedy(integers(2, 9), small(2, 9), integers(2, 9), 0),
            "max_path must be in [1, 128], got 0",
        ),
        (
            lambda: longleaf_kernels.accept_greedy(integers(2, 9), small(2, 9), integers(2, 8), 8),
            "target_tokens must be [2, 9], got [2, 8]",
        ),
        (
            lambda: longleaf_kernels.accept_sampled(
                integers(2, 9),
                small(2, 9),
                small(2, 9),
                zeros(2, 9, 50, dtype=torch.float16),
                sampling_of(2),
                zeros(2, 8, dtype=torch.float64),
                some_bytes(),
            ),
            "logits must be float32 or bfloat16, got float16",
        ),
        (
            lambda: longleaf_kernels.accept_sampled(
                integers(2, 9),
                small(2, 9),
                small(2, 9),
                zeros(2, 9, 50),
                sampling_of(3),
                zeros(2, 8, dtype=torch.float64),
                some_bytes(),
            ),
            "temperature must be [2], got [3]",
        ),
    ],
)
def test_a_tracer_refuses_what_a_launch_refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


class Step(torch.nn.Module):  # type: ignore[misc]  # Any where torch is not installed
    """Build, accept and compact, as a captured step chains them."""

    def forward(
        self,
        logits: torch.Tensor,
        root_tokens: torch.Tensor,
        target_tokens: torch.Tensor,
        workspace: torch.Tensor,
        pool: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        trees, _ = longleaf_kernels.build_tree(logits, root_tokens, 8, workspace=workspace)
        accepted = longleaf_kernels.accept_greedy(trees.tokens, trees.parents, target_tokens, 8)
        longleaf_kernels.compact_kv([pool], slots, accepted.path, accepted.path_len)
        return accepted.bonus


def test_a_step_exports_with_a_free_batch_and_keeps_its_side_effects() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    example = (
        zeros(2, 7, 1000),
        integers(2),
        integers(2, 9),
        zeros(1 << 10, dtype=torch.uint8),
        zeros(20, 576, dtype=torch.bfloat16),
        integers(2, 9),
    )
    program = torch.export.export(
        Step(), example, dynamic_shapes=({0: batch}, {0: batch}, {0: batch}, None, None, {0: batch})
    )
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    operators = ["build_tree", "accept_greedy", "compact_kv"]
    assert [c for c in calls if "longleaf" in c] == [f"longleaf.{o}.default" for o in operators]


@pytest.mark.parametrize(
    ("name", "mutated"),
    [
        ("build_tree", {"workspace"}),
        ("top_k_marginals", {"workspace"}),
        ("expand_tree", set()),
        ("accept_greedy", set()),
        ("accept_sampled", {"workspace"}),
        ("compact_kv", {"pools"}),
    ],
)
def test_schemas_say_what_an_operator_writes(name: str, mutated: set[str]) -> None:
    schema = getattr(torch.ops.longleaf, name).default._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == mutated
