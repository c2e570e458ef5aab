"""SGLang's Triton attention kernels as contenders, called the way its Triton backend calls them.

The sources are SGLang's own, imported from an installation or an unpacked wheel and never copied:
only sglang/kernels/ops/attention/{decode_attention,extend_attention,prefill_attention,score_mod,
metadata}.py run, with stand-ins for the packages around them, so that nothing but torch and Triton
is needed. Read in 0.5.17: srt/layers/attention/triton_backend.py.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernel_bench.cases import LATENT_DIM
from kernel_bench.inputs import SCALE, Inputs
from kernel_bench.timing import Launch

ATTENTION = "sglang.kernels.ops.attention"
BASE_KV_SPLITS = 8
"""triton_attention_num_kv_splits of the server's arguments."""
MIN_BLOCK_KV = 32
CONTEXT_LENGTH = 262_144
"""Of the served model; it bounds the number of splits."""


class SglangMissingError(RuntimeError):
    """SGLang's kernels cannot be imported; the message says why."""


def find_sources(path: str | None) -> Path:
    """Return the directory of the package sglang: path itself or in it, or an installation."""
    if path:
        candidates = [Path(path), Path(path) / "sglang"]
    else:
        spec = importlib.util.find_spec("sglang")
        candidates = [Path(item) for item in (spec and spec.submodule_search_locations) or ()]
        if not candidates:
            raise SglangMissingError(
                "sglang is not installed, and neither --sglang nor SGLANG_SRC is set"
            )
    for candidate in candidates:
        if (candidate / "kernels/ops/attention/extend_attention.py").is_file():
            return candidate
    raise SglangMissingError(
        f"no sglang/kernels/ops/attention/extend_attention.py under {path or ''}"
    )


@dataclass(frozen=True)
class SglangKernels:
    """The functions that the Triton backend calls."""

    extend: Any
    decode: Any
    num_kv_splits: Any

    @classmethod
    def load(cls, path: str | None) -> "SglangKernels":
        """Import them. Raises SglangMissingError."""
        with _stand_ins(find_sources(path)):
            try:
                extend, decode, metadata = (
                    importlib.import_module(f"{ATTENTION}.{name}")
                    for name in ("extend_attention", "decode_attention", "metadata")
                )
            except ImportError as error:
                raise SglangMissingError(f"SGLang's kernels do not import: {error}") from error
        return cls(
            extend.extend_attention_fwd,
            decode.decode_attention_fwd,
            metadata.get_num_kv_splits_triton,
        )

    def prepare(self, inputs: Inputs) -> Launch:
        """Return the launch that SGLang makes for the problem: decode for one node, else extend."""
        single = inputs.problem.nodes == 1 and not inputs.problem.causal
        return self.prepare_decode(inputs) if single else self.prepare_extend(inputs)

    def prepare_extend(self, inputs: Inputs) -> Launch:
        """Target verify with a tree mask, or a causal extend without one."""
        problem, device = inputs.problem, inputs.q.device
        keys = inputs.tree_kv[:, None]
        values = keys[..., :LATENT_DIM].contiguous()
        qo_indptr = (torch.arange(problem.batch + 1, device=device) * problem.nodes).int()
        mask, mask_indptr = (None, None) if problem.causal else full_mask(inputs)

        def launch(layer: Tensor) -> None:
            pool = layer[:, None]
            self.extend(
                inputs.q,
                keys,
                values,
                inputs.out,
                pool,
                pool[..., :LATENT_DIM],
                qo_indptr,
                inputs.indptr,
                inputs.indices,
                mask,
                True,
                mask_indptr,
                problem.nodes,
                1.0,
                1.0,
                SCALE,
            )

        return launch

    def prepare_decode(self, inputs: Inputs) -> Launch:
        """Plain decode: the new token is in the pool already, in a request's spare slot."""
        problem, device = inputs.problem, inputs.q.device
        processors: int = torch.cuda.get_device_properties(device).multi_processor_count
        most = max_kv_splits(processors)
        lengths = torch.tensor(problem.prefixes) + 1
        indptr = torch.tensor([0, *lengths.tolist()]).cumsum(0).int().to(device)
        parts = inputs.indices.split(list(problem.prefixes))
        ends = inputs.spare_slots.split(1)
        indices = torch.cat([x for pair in zip(parts, ends, strict=True) for x in pair])
        shape = (problem.batch, problem.heads, most)
        sums = torch.empty(*shape, LATENT_DIM, device=device)
        lse = torch.empty(shape, device=device)
        splits = torch.empty(problem.batch, dtype=torch.int32, device=device)
        self.num_kv_splits[(1,)](
            splits,
            lengths.to(device),
            problem.batch,
            1,
            problem.heads,
            1,
            most,
            processors,
            MAX_NUM_SEQ=256,
        )

        def launch(layer: Tensor) -> None:
            pool = layer[:, None]
            self.decode(
                inputs.q,
                pool,
                pool[..., :LATENT_DIM],
                inputs.out,
                indptr,
                indices,
                sums,
                lse,
                splits,
                most,
                SCALE,
                1.0,
                1.0,
                has_mla=True,
                use_pdl=torch.cuda.get_device_capability(device)[0] >= 9,
            )

        return launch


def full_mask(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """SGLang's custom mask: bool, for each request [nodes, prefix + nodes], and where each starts.

    The kernel reads the last `nodes` columns only (skip_prefix_custom_mask).
    """
    problem = inputs.problem
    sizes = [problem.nodes * (prefix + problem.nodes) for prefix in problem.prefixes]
    starts = torch.tensor([0, *sizes]).cumsum(0)
    mask = torch.ones(sum(sizes), dtype=torch.bool, device=inputs.q.device)
    for block, prefix in zip(mask.split(sizes), problem.prefixes, strict=True):
        block.view(problem.nodes, -1)[:, prefix:] = inputs.dense
    return mask, starts.to(inputs.q.device)


def max_kv_splits(processors: int) -> int:
    """The backend's bound for MLA: the next power of two of the multiprocessors."""

    def power(value: int) -> int:
        return int(1 << (value - 1).bit_length())

    return max(BASE_KV_SPLITS, min(power(processors), power(CONTEXT_LENGTH // MIN_BLOCK_KV)))


@contextmanager
def _stand_ins(package: Path) -> Iterator[None]:
    """Let the attention modules import each other without running the packages' own code."""
    attention = package / "kernels/ops/attention"
    utils = ModuleType("sglang.srt.utils")
    utils.__dict__.update(
        is_cuda=lambda: torch.version.cuda is not None,
        is_hip=lambda: torch.version.hip is not None,
        is_gfx95_supported=lambda: False,
    )
    modules = {"sglang.srt.utils": utils}
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", ATTENTION, "sglang.srt"):
        modules[name] = ModuleType(name)
        modules[name].__path__ = [str(attention)] if name == ATTENTION else []
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_sglang(name)}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_sglang(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _is_sglang(name: str) -> bool:
    return name == "sglang" or name.startswith("sglang.")
