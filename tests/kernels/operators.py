"""The operators as the shared cases call them: CPU tensors in and out, wherever they run."""

from collections.abc import Sequence
from ctypes import CDLL, c_uint
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from longleaf_kernels import (
    Accepted,
    DraftTrees,
    Marginals,
    SamplingTensors,
    accept_greedy,
    accept_sampled,
    accept_workspace,
    build_tree,
    build_tree_workspace,
    compact_kv,
    expand_tree,
)
from longleaf_kernels._library import Library
from longleaf_kernels._tree import launch_build_tree, launch_expand_tree
from longleaf_kernels.accept import launch_accept_greedy, launch_accept_sampled
from longleaf_kernels.compact import launch_compact_kv


class Operators(Protocol):
    def build_tree(
        self, logits: Tensor, roots: Tensor, prefix_lens: Tensor, budget: int, seed_chain: bool
    ) -> tuple[DraftTrees, Marginals]: ...

    def expand_tree(
        self,
        tokens: Tensor,
        log_probs: Tensor,
        roots: Tensor,
        prefix_lens: Tensor,
        budget: int,
        seed_chain: bool,
    ) -> DraftTrees: ...

    def accept_greedy(
        self, tokens: Tensor, parents: Tensor, target_tokens: Tensor, max_path: int
    ) -> Accepted: ...

    def accept_sampled(
        self,
        trees: DraftTrees,
        logits: Tensor,
        sampling: SamplingTensors,
        uniforms: Tensor,
        every_node: bool,
    ) -> Accepted: ...

    def compact_kv(
        self, pools: Sequence[Tensor], slots: Tensor, path: Tensor, path_len: Tensor
    ) -> None: ...


class EmulatedOperators:
    """The kernels compiled for the CPU; every call draws a new order of threads.

    One workspace, zeroed once, serves calls of every operator and size.
    """

    def __init__(self, path: Path) -> None:
        self._library = Library(path)
        self._seed = CDLL(str(path)).emulator_seed
        self._calls = 0
        self._workspace = torch.zeros(1 << 22, dtype=torch.uint8)

    def _shuffle(self) -> None:
        self._calls += 1
        self._seed(c_uint(self._calls))

    def build_tree(
        self, logits: Tensor, roots: Tensor, prefix_lens: Tensor, budget: int, seed_chain: bool
    ) -> tuple[DraftTrees, Marginals]:
        self._shuffle()
        trees, marginals = launch_build_tree(
            self._library, 0, logits, roots, prefix_lens, self._workspace, budget, seed_chain
        )
        assert trees is not None
        return trees, marginals

    def expand_tree(
        self,
        tokens: Tensor,
        log_probs: Tensor,
        roots: Tensor,
        prefix_lens: Tensor,
        budget: int,
        seed_chain: bool,
    ) -> DraftTrees:
        self._shuffle()
        return launch_expand_tree(
            self._library, 0, tokens, log_probs, roots, prefix_lens, budget, seed_chain
        )

    def accept_greedy(
        self, tokens: Tensor, parents: Tensor, target_tokens: Tensor, max_path: int
    ) -> Accepted:
        self._shuffle()
        return launch_accept_greedy(self._library, 0, tokens, parents, target_tokens, max_path)

    def accept_sampled(
        self,
        trees: DraftTrees,
        logits: Tensor,
        sampling: SamplingTensors,
        uniforms: Tensor,
        every_node: bool,
    ) -> Accepted:
        self._shuffle()
        return launch_accept_sampled(
            self._library,
            0,
            trees.tokens,
            trees.parents,
            trees.depths,
            logits,
            sampling,
            uniforms,
            self._workspace,
            every_node,
        )

    def compact_kv(
        self, pools: Sequence[Tensor], slots: Tensor, path: Tensor, path_len: Tensor
    ) -> None:
        self._shuffle()
        launch_compact_kv(self._library, 0, pools, slots, path, path_len)


class GpuOperators:
    """The operators on the first GPU. A workspace is reused between calls, as in a server."""

    def __init__(self) -> None:
        self._workspaces: dict[tuple[int, ...], Tensor] = {}

    def build_tree(
        self, logits: Tensor, roots: Tensor, prefix_lens: Tensor, budget: int, seed_chain: bool
    ) -> tuple[DraftTrees, Marginals]:
        batch, depth, vocabulary = logits.shape
        key = batch, depth, vocabulary, budget
        if key not in self._workspaces:
            self._workspaces[key] = build_tree_workspace(
                batch, depth, vocabulary, budget, device="cuda"
            )
        inputs = logits.cuda(), roots.cuda()
        trees, marginals = build_tree(
            *inputs, budget, seed_chain, prefix_lens.cuda(), self._workspaces[key]
        )
        return DraftTrees(*(t.cpu() for t in trees)), Marginals(*(t.cpu() for t in marginals))

    def expand_tree(
        self,
        tokens: Tensor,
        log_probs: Tensor,
        roots: Tensor,
        prefix_lens: Tensor,
        budget: int,
        seed_chain: bool,
    ) -> DraftTrees:
        inputs = tokens.cuda(), log_probs.cuda(), roots.cuda()
        trees = expand_tree(*inputs, budget, seed_chain, prefix_lens.cuda())
        return DraftTrees(*(tensor.cpu() for tensor in trees))

    def accept_greedy(
        self, tokens: Tensor, parents: Tensor, target_tokens: Tensor, max_path: int
    ) -> Accepted:
        out = accept_greedy(tokens.cuda(), parents.cuda(), target_tokens.cuda(), max_path)
        return Accepted(*(tensor.cpu() for tensor in out))

    def accept_sampled(
        self,
        trees: DraftTrees,
        logits: Tensor,
        sampling: SamplingTensors,
        uniforms: Tensor,
        every_node: bool,
    ) -> Accepted:
        batch, nodes = trees.tokens.shape
        key = batch, nodes
        if key not in self._workspaces:
            self._workspaces[key] = accept_workspace(batch, nodes, device="cuda")
        out = accept_sampled(
            trees.tokens.cuda(),
            trees.parents.cuda(),
            trees.depths.cuda(),
            logits.cuda(),
            SamplingTensors(*(tensor.cuda() for tensor in sampling)),
            uniforms.cuda(),
            self._workspaces[key],
            every_node,
        )
        return Accepted(*(tensor.cpu() for tensor in out))

    def compact_kv(
        self, pools: Sequence[Tensor], slots: Tensor, path: Tensor, path_len: Tensor
    ) -> None:
        on_gpu = [  # strides kept, which .cuda() does not promise
            torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype, device="cuda")
            for pool in pools
        ]
        for pool, copy in zip(pools, on_gpu, strict=True):
            copy.copy_(pool)
        compact_kv(on_gpu, slots.cuda(), path.cuda(), path_len.cuda())
        for pool, moved in zip(pools, on_gpu, strict=True):
            pool.copy_(moved)
