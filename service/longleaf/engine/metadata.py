"""What the backend `longleaf_mla` tells `verify_mla` about a forward pass, and its own buffers.

The only buffer that grows with the context is the list of prefix slots: 4 bytes a token of every
request of the largest captured batch. Visibility is one bit a pair of nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORD_BITS = 64


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The arguments of `verify_mla` that a whole forward pass shares.

    kv_indptr: int32 [batch + 1] and kv_indices: int32 [n], prefix tokens only, never this step's.
    visible: int64 [batch * nodes, ceil(nodes / 64)], or None for causal.
    q_indptr: int32 [batch + 1] where requests have different numbers of rows, else None.
    nodes: the rows of a request, or the most of them.
    rows: the rows of the whole batch where the pass may have more, which are padding; else None.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    visible: Tensor | None
    q_indptr: Tensor | None
    nodes: int
    rows: int | None = None


def words(nodes: int) -> int:
    """Return the 64-bit words of one node's visibility."""
    return -(-nodes // WORD_BITS)


def pack_bits(allowed: Tensor) -> Tensor:
    """Pack bool [..., nodes] into int64 [..., ceil(nodes / 64)], bit j for column j."""
    nodes = allowed.shape[-1]
    padded = torch.nn.functional.pad(allowed.long(), (0, words(nodes) * WORD_BITS - nodes))
    shift = torch.arange(WORD_BITS, device=allowed.device)
    return (padded.unflatten(-1, (-1, WORD_BITS)) << shift).sum(-1)


@dataclass(frozen=True, slots=True)
class FixedBits:
    """Visibility that does not depend on the tree, int64 [nodes, words] each."""

    own: Tensor
    """Every node sees itself alone: padding."""
    causal: Tensor
    """Node i sees nodes 0..i: a chain."""


def fixed_bits(nodes: int, device: torch.device | str) -> FixedBits:
    """Return the self-only and the causal visibility of that many nodes."""
    ones = torch.ones(nodes, nodes, dtype=torch.bool, device=device)
    eye = torch.eye(nodes, dtype=torch.bool, device=device)
    return FixedBits(own=pack_bits(eye), causal=pack_bits(ones.tril()))


def full_mask_bits(mask: Tensor, prefix_lens: Tensor, nodes: int) -> Tensor:
    """Read the tree's part of SGLang's full mask, without a host sync.

    mask: bool, flat; for every request nodes rows of prefix_len + nodes columns. Returns int64
    [requests * nodes, words].
    """
    columns = prefix_lens.long() + nodes
    start = (columns * nodes).cumsum(0) - columns * nodes
    node = torch.arange(nodes, device=mask.device)
    row = start[:, None] + node * columns[:, None]
    cell = row[:, :, None] + prefix_lens.long()[:, None, None] + node
    return pack_bits(mask[cell]).flatten(0, 1)


def fill_visible(target: Tensor, bits: Tensor | None, rows: int, fixed: FixedBits) -> None:
    """Write the visibility of a batch into target, int64 [batch * nodes, words].

    bits: int64 [rows * nodes, words] of the first `rows` requests, None for a chain. Requests
    after them are padding: whatever stood there before, their nodes see themselves alone.
    """
    nodes, width = fixed.own.shape
    requests = target.view(-1, nodes, width)
    if rows > 0:
        requests[:rows].copy_(fixed.causal if bits is None else bits.view(rows, nodes, width))
    if rows < requests.shape[0]:
        requests[rows:].copy_(fixed.own)


def plan_prefix(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    lengths: Tensor,
    *,
    rows: int,
    shorter: int = 0,
) -> None:
    """Fill kv_indptr, int32 [batch + 1], and kv_indices, int32, from lengths on the device.

    req_to_token: int32 [requests, context]. The prefix of request i is the first
    ``lengths[i] - shorter`` slots of its row, and nothing for i >= rows.

    Nothing is read back by the host: lengths may be newer than any copy that the host has.
    """
    if req_to_token.is_cuda:
        from longleaf.engine import gather_kernel as kernel

        batch = kv_indptr.shape[0] - 1
        if batch > kernel.MAX_BATCH:
            raise ValueError(f"longleaf_mla serves {kernel.MAX_BATCH} requests, got {batch}")
        kernel.gather_prefix[batch, kernel.PARTS](
            req_to_token, req_to_token.stride(0), req_pool_indices, lengths, kv_indptr, kv_indices,
            rows, SHORTER=shorter, MAX_BATCH=kernel.MAX_BATCH, PARTS=kernel.PARTS,
            BLOCK=kernel.BLOCK,
        )  # fmt: skip
        return
    prefix = (lengths.long() - shorter).clamp(min=0)
    prefix[rows:] = 0
    kv_indptr[0] = 0
    kv_indptr[1:] = prefix.cumsum(0)
    for i, length in enumerate(prefix.tolist()):
        start = int(kv_indptr[i])
        kv_indices[start : start + length] = req_to_token[req_pool_indices[i], :length]


class GraphBuffers:
    """What captured graphs read: their addresses never change."""

    def __init__(
        self, max_batch: int, visible_words: int, context: int, device: torch.device | str
    ) -> None:
        """context: the most slots of a request; visible_words: of the whole batch's nodes."""
        self.max_batch = max_batch
        self.kv_indptr = torch.zeros(max_batch + 1, dtype=torch.int32, device=device)
        self.kv_indices = torch.zeros(max_batch * context, dtype=torch.int32, device=device)
        self.visible = torch.zeros(visible_words, dtype=torch.int64, device=device)

    def plan(self, batch: int, nodes: int) -> StepPlan:
        """Return the views that a graph of one size reads."""
        visible = None
        if nodes > 1:
            rows = batch * nodes
            visible = self.visible[: rows * words(nodes)].view(rows, words(nodes))
        return StepPlan(self.kv_indptr[: batch + 1], self.kv_indices, visible, None, nodes)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(item.nbytes for item in (self.kv_indptr, self.kv_indices, self.visible))


class GraphPlans:
    """The buffers of every graph that was captured, by its batch and width.

    Graphs of every width read the same buffers: each replay fills them anew, and replays follow
    one another on one stream. A later, larger request for buffers adds a second set; graphs
    captured before go on reading the first, so a size that exists in both is filled in both.
    """

    def __init__(self, context: int, device: torch.device | str) -> None:
        self._context = context
        self._device = device
        self._sets: list[GraphBuffers] = []
        self._plans: dict[tuple[int, int], list[StepPlan]] = {}

    def reserve(self, max_batch: int, max_tokens: int) -> None:
        """Make sure that graphs of up to max_batch requests and max_tokens nodes have buffers."""
        needed = max_tokens * words(-(-max_tokens // max_batch))
        if self._sets:
            latest = self._sets[-1]
            if max_batch <= latest.max_batch and needed <= latest.visible.numel():
                return
            max_batch = max(max_batch, latest.max_batch)
            needed = max(needed, latest.visible.numel())
        self._sets.append(GraphBuffers(max_batch, needed, self._context, self._device))

    def captured(self, batch: int, nodes: int) -> StepPlan:
        """Return the plan of a graph that is being captured, and remember it for its replays."""
        if not self._sets:
            raise RuntimeError("init_cuda_graph_state was not called before a graph was captured")
        plans = self._plans.setdefault((batch, nodes), [])
        plan = self._sets[-1].plan(batch, nodes)
        for known in plans:
            if known.kv_indices is plan.kv_indices:
                return known
        plans.append(plan)
        return plan

    def replayed(self, batch: int, nodes: int) -> list[StepPlan]:
        """Return every plan that a graph of this size may read."""
        plans = self._plans.get((batch, nodes))
        if not plans:
            raise RuntimeError(f"no graph of {batch} requests x {nodes} nodes was captured")
        return plans

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(item.nbytes for item in self._sets)


@dataclass(frozen=True, slots=True)
class Segments:
    """Extends cut into pieces of at most as many rows as a launch takes, in the rows' order.

    request: index into the batch; prefix: tokens before the piece, the request's earlier pieces
    included, which lie in the cache by then; rows: new tokens of the piece.
    """

    request: list[int]
    prefix: list[int]
    rows: list[int]


def cut_extends(prefix_lens: Sequence[int], lengths: Sequence[int], most: int) -> Segments:
    """Cut extends of `lengths` new tokens over `prefix_lens` cached ones; empty ones stay."""
    segments = Segments([], [], [])
    for request, (prefix, length) in enumerate(zip(prefix_lens, lengths, strict=True)):
        for first in range(0, max(length, 1), most):
            segments.request.append(request)
            segments.prefix.append(prefix + first)
            segments.rows.append(min(most, length - first))
    return segments
