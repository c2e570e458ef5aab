"""Attention over packed sequences in plain torch: the prefill kernels' measure."""

from typing import Any

import torch


def plain_varlen(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, scale: float,
    causal: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """The kernels' contract in plain torch; checks what it is told about the lengths."""
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_full(q.shape[:2], float("-inf"))
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    assert (starts_q[-1], starts_k[-1]) == (q.shape[0], k.shape[0])
    assert max_q == int(cu_q.diff().max())
    assert max_k == int(cu_k.diff().max())
    for i in range(len(starts_q) - 1):
        rows = slice(starts_q[i], starts_q[i + 1])
        keys = slice(starts_k[i], starts_k[i + 1])
        scores = torch.einsum("qhd,khd->qhk", q[rows], k[keys]) * scale
        if causal:
            ones = torch.ones(scores.shape[0], scores.shape[2], device=q.device)
            hidden = ones.triu(1) == 1
            scores.masked_fill_(hidden[:, None], float("-inf"))
        if scores.shape[2]:
            lse[rows] = scores.logsumexp(-1)
            out[rows] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v[keys])
    return out, lse
