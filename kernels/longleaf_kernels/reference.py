"""Verify attention in plain torch, float64 or float32, on any device: the kernels' measure."""

import torch
from torch import Tensor

LATENT_DIM = 512
WORD_BITS = 64
SCORES_HELD = 1 << 24
"""Scores in memory at a time: a prefix of 200k tokens under many rows goes chunk by chunk."""


def verify_mla_reference(
    q: Tensor,
    kv_pool: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_kv: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    kv_scale: float = 1.0,
    q_indptr: Tensor | None = None,
    page_indptr: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return what `verify_mla` returns for the same arguments, before any rounding of the result.

    Shapes and meaning are those of `longleaf_kernels.verify.verify_mla`; any float dtype of q,
    kv_pool and tree_kv. dtype: of the arithmetic and the result. Reads only the pool rows that
    kv_indices names. A node that sees no token gives 0 and -inf.

    Returns out [T, H, 512] and lse [T, H], natural log-sum-exp of the scaled scores.
    """
    tokens, heads, width = q.shape
    batch = kv_indptr.shape[0] - 1
    starts = _row_starts(q_indptr, tokens, batch)
    lengths = kv_indptr.tolist()
    out = torch.empty(tokens, heads, LATENT_DIM, dtype=dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=dtype, device=q.device)
    for request in range(batch):
        rows = slice(starts[request], starts[request + 1])
        nodes = rows.stop - rows.start
        slots = _prefix_slots(kv_pool, kv_indices, lengths, page_indptr, request)
        queries = q[rows].to(dtype).reshape(nodes * heads, width) * scale
        state = _SoftmaxState(queries)
        for chunk in slots.split(max(1, SCORES_HELD // max(1, nodes * heads))):
            keys = kv_pool.reshape(-1, width)[chunk].to(dtype) * kv_scale
            state.attend(keys, None)
        seen = _visible_nodes(None if visible is None else visible[rows], nodes, q.device)
        state.attend(tree_kv[rows].to(dtype), seen.repeat_interleave(heads, dim=0))
        values, sums = state.result()
        out[rows] = values.reshape(nodes, heads, LATENT_DIM)
        lse[rows] = sums.reshape(nodes, heads)
    return out, lse


class _SoftmaxState:
    """Softmax-weighted values of rows over keys that come in pieces."""

    def __init__(self, queries: Tensor) -> None:
        self._queries = queries
        self._peak = queries.new_full((len(queries), 1), float("-inf"))
        self._sum = queries.new_zeros(len(queries), 1)
        self._values = queries.new_zeros(len(queries), LATENT_DIM)

    def attend(self, keys: Tensor, seen: Tensor | None) -> None:
        """Add keys [n, width]; seen: bool [rows, n], None for all."""
        if len(keys) == 0:
            return
        scores = self._queries @ keys.T
        if seen is not None:
            scores.masked_fill_(~seen, float("-inf"))
        peak = torch.maximum(self._peak, scores.amax(dim=1, keepdim=True))
        # Where nothing has been seen yet the peak is -inf, and -inf - -inf is NaN.
        shift = peak.masked_fill(peak == float("-inf"), 0.0)
        weights = torch.exp(scores - shift)
        kept = torch.exp(self._peak - shift)
        self._peak = peak
        self._sum = self._sum * kept + weights.sum(dim=1, keepdim=True)
        self._values = self._values * kept + weights @ keys[:, :LATENT_DIM]

    def result(self) -> tuple[Tensor, Tensor]:
        empty = self._sum == 0.0
        values = self._values / self._sum.masked_fill(empty, 1.0)
        return values, (self._peak + torch.log(self._sum)).squeeze(1)


def _row_starts(q_indptr: Tensor | None, tokens: int, batch: int) -> list[int]:
    """Return where each request's nodes start, and the end."""
    if q_indptr is not None:
        return [int(start) for start in q_indptr.tolist()]
    return list(range(0, tokens + 1, tokens // batch))


def _prefix_slots(
    kv_pool: Tensor,
    kv_indices: Tensor,
    lengths: list[int],
    page_indptr: Tensor | None,
    request: int,
) -> Tensor:
    """Return the row of the flattened pool of every prefix token of a request."""
    first, end = lengths[request], lengths[request + 1]
    if page_indptr is None:
        return kv_indices[first:end].long()
    page_size = kv_pool.shape[1]
    pages = kv_indices[int(page_indptr[request]) : int(page_indptr[request + 1])].long()
    within = torch.arange(page_size, device=pages.device)
    return (pages[:, None] * page_size + within).flatten()[: end - first]


def _visible_nodes(bits: Tensor | None, nodes: int, device: torch.device) -> Tensor:
    """Return bool [nodes, nodes]: row i sees node j. bits: int64 [nodes, words], None = causal."""
    if bits is None:
        return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()
    node = torch.arange(nodes, device=device)
    return (bits[:, node // WORD_BITS] >> (node % WORD_BITS)) & 1 == 1
