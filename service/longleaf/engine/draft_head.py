"""Marginals of a draft block over the whole vocabulary, the same on every tensor-parallel rank.

The drafter has no head of its own: it borrows the target's, of which each rank holds a shard of
the vocabulary. Every rank takes the top K of its shard, all gather all shards' candidates, and
each merges the same numbers in the same order. All of it runs inside the draft graph.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longleaf_kernels._tree import Marginals, marginal_width
from longleaf_kernels.tree import build_tree_workspace, top_k_marginals


class Shard(NamedTuple):
    """The part of the vocabulary that a rank's head covers: rows [0, size) are tokens start on."""

    weight: Tensor
    start: int
    size: int


class DraftMarginals(NamedTuple):
    """tokens: int64[batch, depth, k], log_probs: float64[batch, depth, k], descending."""

    tokens: Tensor
    log_probs: Tensor


def head_shard(lm_head: Any, world_size: int) -> Shard:
    """Return this rank's shard of a head; raises ValueError for a head that cannot be used."""
    weight = getattr(lm_head, "weight", None)
    if weight is None:
        raise ValueError("DDTREE needs a target that exposes lm_head.weight")
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"DDTREE needs an unquantised lm_head, got {weight.dtype}")
    if not hasattr(lm_head, "shard_indices"):
        if world_size != 1:
            raise ValueError("DDTREE needs a vocabulary-parallel lm_head when there are ranks")
        return Shard(weight, 0, int(weight.shape[0]))
    indices = lm_head.shard_indices
    if int(indices.num_added_elements) != 0:
        raise ValueError("DDTREE takes no vocabulary with added tokens (LoRA)")
    return Shard(weight, int(indices.org_vocab_start_index), int(indices.num_org_elements))


class MarginalHead:
    """The tail of the draft graph: hidden states to marginals, into buffers of fixed place.

    Called by the hook that SGLang runs at the end of the captured forward. `tokens` and
    `log_probs` hold the last batch's marginals, [max_batch, depth, k]; `eager` returns them
    for a batch that runs without a graph.
    """

    def __init__(
        self, shard: Shard, block_size: int, k: int, max_batch: int, group: Any = None
    ) -> None:
        self.shard = shard
        self.block_size = block_size
        self.k = k
        self.group = group
        self.world_size = 1 if group is None else int(group.world_size)
        device = shard.weight.device
        shape = (max_batch, block_size - 1, k)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(shape, dtype=torch.float64, device=device)
        self._workspace = self._new_workspace(max_batch)
        self._eager_batch = max_batch
        self._eager_workspace = self._workspace

    def __call__(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> None:
        """Compute the marginals of hidden states [batch * block, hidden] into the buffers."""
        tokens, log_probs = self._marginals(hidden_states, self._workspace)
        batch = tokens.shape[0]
        self.tokens[:batch].copy_(tokens)
        self.log_probs[:batch].copy_(log_probs)

    def captured(self, batch: int) -> DraftMarginals:
        """Return what the last replay left for the first requests."""
        return DraftMarginals(self.tokens[:batch], self.log_probs[:batch])

    def eager(self, hidden_states: Tensor) -> DraftMarginals:
        """Compute the marginals of a batch of any size outside a graph."""
        batch = hidden_states.shape[0] // self.block_size
        if batch > self._eager_batch:
            self._eager_workspace = self._new_workspace(batch)
            self._eager_batch = batch
        return DraftMarginals(*self._marginals(hidden_states, self._eager_workspace))

    def _new_workspace(self, batch: int) -> Tensor:
        shard = self.shard
        k = marginal_width(shard.size, self.k)
        return build_tree_workspace(
            batch, self.block_size - 1, shard.size, k, device=shard.weight.device
        )

    def _marginals(self, hidden_states: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self._merged(hidden_states, workspace)

    def _merged(self, hidden_states: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
        shard = self.shard
        batch = hidden_states.shape[0] // self.block_size
        # Position 0 of the block is the root, known already. One product of all rows: a batched
        # one would read the head once a request.
        drafted = hidden_states.view(batch, self.block_size, -1)[:, 1:].to(shard.weight.dtype)
        rows = drafted.reshape(batch * (self.block_size - 1), -1)
        logits = torch.matmul(rows, shard.weight[: shard.size].T)
        logits = logits.view(batch, self.block_size - 1, shard.size)
        if logits.dtype == torch.float16:
            logits = logits.float()
        local = top_k_marginals(logits, marginal_width(shard.size, self.k), workspace)
        if self.world_size == 1:
            return pad_candidates(local.tokens + shard.start, local.log_probs, self.k)
        packed = pack_shard(local, logits, shard.start, self.k)
        gathered = packed.new_empty(self.world_size * packed.numel())
        self.group.all_gather_into_tensor(gathered, packed.view(-1))
        return merge_shards(gathered.view(self.world_size, *packed.shape), self.k)


def pad_candidates(tokens: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Fill candidates [..., fewer than k] up to k with tokens that a tree never takes."""
    missing = k - tokens.shape[-1]
    if missing == 0:
        return tokens, values
    return (
        torch.nn.functional.pad(tokens, (0, missing), value=-1),
        torch.nn.functional.pad(values, (0, missing), value=float("-inf")),
    )


def pack_shard(local: Marginals, logits: Tensor, start: int, k: int) -> Tensor:
    """Lay a shard's candidates out for one all-gather: int64[batch, depth, 2 k + 1].

    Per row: k logits as the bits of float64, k token ids of the whole vocabulary, and the bits of
    the shard's log-sum-exp. The logits themselves travel, not log-probabilities, so that equal
    logits in two shards stay equal; NaN counts as -inf, as it does within a shard.
    """
    values = logits.gather(2, local.tokens).double()
    values = values.masked_fill(values.isnan(), float("-inf"))
    tokens, values = pad_candidates(local.tokens + start, values, k)
    bits = (values.view(torch.int64), tokens, local.log_sum_exp.unsqueeze(2).view(torch.int64))
    return torch.cat(bits, dim=2)


def merge_shards(gathered: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of all shards' candidates: tokens and log-probabilities.

    gathered: int64[ranks, batch, depth, 2 k + 1] of `pack_shard`. Shards hold ascending ranges of
    the vocabulary and list equal logits by lower id, so a stable sort of their rows, rank after
    rank, settles ties by lower id too: the order of one row over the whole vocabulary.
    """
    ranks, batch, depth, _ = gathered.shape
    rows = gathered.permute(1, 2, 0, 3)
    values = rows[..., :k].contiguous().view(torch.float64).reshape(batch, depth, ranks * k)
    tokens = rows[..., k : 2 * k].reshape(batch, depth, ranks * k)
    totals = torch.logsumexp(rows[..., 2 * k].contiguous().view(torch.float64), dim=2)
    ranked, order = torch.sort(values, dim=2, descending=True, stable=True)
    best = ranked[..., :k]
    impossible = best == float("-inf")
    log_probs = (best - totals.unsqueeze(2)).clamp(max=0.0)
    log_probs = log_probs.masked_fill(impossible | log_probs.isnan(), float("-inf"))
    return tokens.gather(2, order[..., :k]), log_probs
