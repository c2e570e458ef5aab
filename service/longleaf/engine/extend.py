"""Extends of new tokens: which of the two forms of MLA attention, and the up-projected one.

Absorbed attention (`verify_mla`) reads 576 numbers a cached token for all heads but costs
2 * (576 + 512) FLOP a query, head and cached token. Up-projected attention costs 4 * 192 of them
(the values padded to the keys' width), after 2 * 512 * 256 a cached token and head for K and V
whatever the number of queries. By FLOP both cost the same near 190 new tokens; measured, the
up-projection of a long prefix costs far more than its FLOP say.
"""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from longleaf.engine.metadata import StepPlan, cut_extends, plan_prefix
from longleaf_kernels.verify import MAX_BATCH, MAX_NODES

ABSORBED_EXTEND_TOKENS = 512
"""Up to so many new tokens a request, an extend over a cached prefix takes the absorbed form.

Measured (ops/results/engine-h200.json, extend_128k_* and extend_32k_*): over 128k it takes half the
time of the other at all lengths tried, 64 to 512; over 32k both are the host's launches.
"""
ABSORBED_VARIABLE = "LONGLEAF_ABSORBED_EXTEND_TOKENS"
"""Environment variable: a number in place of that one, to measure both forms at any length."""
KERNEL_VARIABLE = "LONGLEAF_PREFILL_ATTENTION"
"""Environment variable: `torch` (the default; any GPU from sm_80) or `fa3` (sm_90 only)."""


class VarlenAttention(Protocol):
    """Multi-head attention over packed sequences."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return out [T, H, v width] and the natural log-sum-exp, float32 [T, H].

        q [T, H, width], k [S, H, width], v [S, H, v width]; cu_q and cu_k: int32 [batch + 1], the
        sequences' starts; max_q and max_k: the longest of each. A query without keys gives 0.
        """
        ...


@cache
def absorbed_extend_tokens() -> int:
    """Return the most new tokens that take the absorbed form. ValueError for no number."""
    text = os.environ.get(ABSORBED_VARIABLE)
    if text is None:
        return ABSORBED_EXTEND_TOKENS
    if not text.isdecimal():
        raise ValueError(f"{ABSORBED_VARIABLE} must be a number of tokens, got {text!r}")
    return int(text)


def use_mha(prefix_lens: Sequence[int], lengths: Sequence[int], *, prefix_allowed: bool) -> bool:
    """Whether an extend takes the up-projected form.

    prefix_allowed: whether SGLang may up-project cached prefixes (its chunked prefix cache is on).
    """
    if not any(prefix_lens):
        return True
    return prefix_allowed and max(lengths, default=0) > absorbed_extend_tokens()


def attention_method(attn: Any, forward_batch: Any) -> Any:
    """Choose SGLang's forward method of a DeepSeek attention layer; its registry's handler.

    attn: DeepseekV2AttentionMLA; forward_batch: ForwardBatch. Returns an AttnForwardMethod.
    """
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        is_in_breakable_cuda_graph,
    )
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
        is_in_tc_piecewise_cuda_graph,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    if is_in_tc_piecewise_cuda_graph() or is_in_breakable_cuda_graph():
        return AttnForwardMethod.MLA
    if not forward_batch.forward_mode.is_extend_without_speculative():
        return AttnForwardMethod.MLA
    mha = use_mha(
        forward_batch.extend_prefix_lens_cpu or (),
        forward_batch.extend_seq_lens_cpu or (),
        prefix_allowed=not attn.disable_chunked_prefix_cache,
    )
    return AttnForwardMethod.MHA_CHUNKED_KV if mha else AttnForwardMethod.MLA


def torch_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """`VarlenAttention` by torch's own flash attention, which wants values as wide as keys."""
    width = v.shape[-1]
    if width < q.shape[-1]:
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - width))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale
    )
    return out[..., :width].contiguous(), by_row(lse, q)


def fa3_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """`VarlenAttention` by the FlashAttention 3 of SGLang's kernels: values of their own width."""
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    out, lse, *_ = flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
    )
    return out, by_row(lse, q)


def by_row(lse: Tensor, q: Tensor) -> Tensor:
    """Turn a kernel's log-sum-exp [H, T] into [T, H], and +inf, a query without keys, into -inf."""
    tokens, heads, _ = q.shape
    if lse.shape != (heads, tokens):
        raise RuntimeError(
            f"the attention kernel returned a log-sum-exp of shape {list(lse.shape)}, "
            f"expected [{heads}, {tokens}]"
        )
    rows = lse.T.contiguous()
    return rows.masked_fill_(rows == float("inf"), float("-inf"))


def chosen_varlen() -> VarlenAttention:
    """Return the kernel that the environment names. Raises ValueError for an unknown one."""
    kernels: dict[str, VarlenAttention] = {"torch": torch_varlen, "fa3": fa3_varlen}
    name = os.environ.get(KERNEL_VARIABLE, "torch")
    if name not in kernels:
        raise ValueError(f"{KERNEL_VARIABLE} must be one of {', '.join(kernels)}, got {name!r}")
    return kernels[name]


class UpProjected:
    """Up-projected attention of one extend batch: its own tokens, and chunks of its prefixes.

    SGLang's model code projects K and V up, asks for each part, and merges the parts by their
    log-sum-exp. SGLang's state of a part lives in the ForwardBatch.
    """

    def __init__(
        self, extend_seq_lens: Tensor, lengths: Sequence[int], kernel: VarlenAttention
    ) -> None:
        """extend_seq_lens: [batch] on the device; lengths: the same on the host."""
        self._cu_q = torch.nn.functional.pad(extend_seq_lens.cumsum(0), (1, 0)).int()
        self._max_q = max(lengths)
        self._rows = sum(lengths)
        self._kernel = kernel

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any, scale: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend to the batch's own tokens, causally, or to the prefix chunk that SGLang is at.

        q: [T, H, width]; rows past the batch's tokens are padding and give 0. Returns the output
        [T, H, v width], with the log-sum-exp [T, H] where SGLang asks for it.
        """
        cu_k, max_k = self._cu_q, self._max_q
        chunk = bool(forward_batch.attn_attend_prefix_cache)
        if chunk:
            cu_k = forward_batch.prefix_chunk_cu_seq_lens[forward_batch.prefix_chunk_idx]
            max_k = forward_batch.prefix_chunk_max_seq_lens[forward_batch.prefix_chunk_idx]
        else:
            k, v = k[: self._rows], v[: self._rows]
        out, lse = self._kernel(
            q[: self._rows], k, v, self._cu_q, cu_k, self._max_q, max_k,
            scale=scale, causal=not chunk,
        )  # fmt: skip
        padding = q.shape[0] - self._rows
        if padding > 0:
            out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding))
            lse = torch.nn.functional.pad(lse, (0, 0, 0, padding))
        return (out, lse) if forward_batch.mha_return_lse else out


class ExtendBatch:
    """An extend batch; what its layers need is made by the first layer that asks."""

    def __init__(self, forward_batch: Any, req_to_token: Tensor, varlen: VarlenAttention) -> None:
        self._batch = forward_batch
        self._req_to_token = req_to_token
        self._varlen = varlen
        self._lengths: list[int] = list(forward_batch.extend_seq_lens_cpu)
        self._absorbed: StepPlan | None = None
        self._up_projected: UpProjected | None = None

    def up_projected(self) -> UpProjected:
        """Return the batch's up-projected attention."""
        if self._up_projected is None:
            self._up_projected = UpProjected(
                self._batch.extend_seq_lens, self._lengths, self._varlen
            )
        return self._up_projected

    def absorbed(self) -> StepPlan:
        """Return what `verify_mla` is to be told about the batch."""
        if self._absorbed is None:
            self._absorbed = self._plan()
        return self._absorbed

    def _plan(self) -> StepPlan:
        """Causal pieces of at most MAX_NODES rows; a piece sees its request's earlier ones.

        They lie in the cache by then: a layer writes all of the batch's rows before it attends.
        """
        batch = self._batch
        device = self._req_to_token.device
        pieces = cut_extends(batch.extend_prefix_lens_cpu, self._lengths, MAX_NODES)
        count = len(pieces.rows)
        if count > MAX_BATCH:
            raise ValueError(
                f"longleaf_mla extends {MAX_BATCH} pieces of {MAX_NODES} tokens at a time, "
                f"got {count}: start with a smaller --chunked-prefill-size"
            )
        host = torch.tensor([pieces.request, pieces.prefix, pieces.rows])
        if device.type == "cuda":
            host = host.pin_memory()
        request, prefix, rows = host.to(device, non_blocking=True)
        plan = StepPlan(
            kv_indptr=torch.empty(count + 1, dtype=torch.int32, device=device),
            kv_indices=torch.empty(sum(pieces.prefix), dtype=torch.int32, device=device),
            visible=None,
            q_indptr=torch.nn.functional.pad(rows.cumsum(0), (1, 0)).int(),
            nodes=max(1, *pieces.rows),
            rows=sum(pieces.rows),
        )
        plan_prefix(
            plan.kv_indptr,
            plan.kv_indices,
            self._req_to_token,
            batch.req_pool_indices[request],
            prefix,
            rows=count,
        )
        return plan
