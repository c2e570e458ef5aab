"""GPU kernels of a tree-speculative decoding step over an MLA cache.

Operators live in the torch namespace `longleaf` and trace and export without a GPU or the
compiled library, which is loaded by the first launch.
"""

from longleaf_kernels._library import KernelError, KernelLibraryError
from longleaf_kernels._tree import DraftTrees, Marginals
from longleaf_kernels.accept import (
    Accepted,
    SamplingTensors,
    accept_greedy,
    accept_sampled,
    accept_workspace,
)
from longleaf_kernels.compact import compact_kv
from longleaf_kernels.tree import build_tree, build_tree_workspace, expand_tree, top_k_marginals
from longleaf_kernels.verify import WorkSplit, verify_mla, verify_workspace

__all__ = [
    "Accepted",
    "DraftTrees",
    "KernelError",
    "KernelLibraryError",
    "Marginals",
    "SamplingTensors",
    "WorkSplit",
    "accept_greedy",
    "accept_sampled",
    "accept_workspace",
    "build_tree",
    "build_tree_workspace",
    "compact_kv",
    "expand_tree",
    "top_k_marginals",
    "verify_mla",
    "verify_workspace",
]
