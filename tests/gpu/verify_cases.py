"""Random inputs of verify_mla and what it must return for them, in float32."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longleaf_kernels.verify import LATENT_DIM, ROW_DIM, WorkSplit, verify_mla

SCALE = 192**-0.5
E4M3_MAX = 448.0
SPARE_SLOTS = 777


@dataclass(frozen=True)
class Shape:
    """What to draw. nodes: one number for all requests, or one each (then ragged)."""

    prefixes: Sequence[int]
    nodes: int | Sequence[int]
    heads: int = 8
    tree: str = "random"  # random, spine, star or causal (no visibility bits)
    pool: torch.dtype = torch.bfloat16
    indices: torch.dtype = torch.int32
    page_size: int = 1
    kv_scale: float = 1.0
    query_scale: float = 1.0


@dataclass
class Case:
    """Arguments of verify_mla, and what the reference needs beside them."""

    shape: Shape
    arguments: dict[str, Tensor | float | int | None]
    node_counts: list[int]
    prefix_slots: list[Tensor]
    dense: list[Tensor]

    def run(self, workspace: Tensor, split: WorkSplit | None = None) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp; both start as NaN."""
        q = self.arguments["q"]
        assert isinstance(q, Tensor)
        out = torch.full((*q.shape[:2], LATENT_DIM), float("nan"), dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:2], float("nan"), device=q.device)
        verify_mla(
            **self.arguments,  # type: ignore[arg-type]
            scale=SCALE,
            workspace=workspace,
            out=out,
            lse=lse,
            split=split,
        )
        return out, lse

    def reference(self) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp in float32."""
        q, pool, rows = (self.arguments[name] for name in ("q", "kv_pool", "tree_kv"))
        assert isinstance(q, Tensor)
        assert isinstance(pool, Tensor)
        assert isinstance(rows, Tensor)
        outs, lses, first = [], [], 0
        for count, slots, dense in zip(
            self.node_counts, self.prefix_slots, self.dense, strict=True
        ):
            prefix = pool.view(-1, ROW_DIM)[slots].float() * self.shape.kv_scale
            keys = torch.cat([prefix, rows[first : first + count].float()])
            scores = torch.einsum("nhd,kd->nhk", q[first : first + count].float(), keys) * SCALE
            scores[:, :, len(slots) :].masked_fill_(~dense[:, None, :], float("-inf"))
            lses.append(torch.logsumexp(scores, -1))
            outs.append(torch.softmax(scores, -1) @ keys[:, :LATENT_DIM])
            first += count
        return torch.cat(outs), torch.cat(lses)


def random_parents(count: int, tree: str) -> list[int]:
    """Return each node's parent; the root's is -1."""
    if tree in ("spine", "causal"):
        return [node - 1 for node in range(count)]
    if tree == "star":
        return [-1] + [0] * (count - 1)
    return [-1] + [int(torch.randint(0, node, ())) for node in range(1, count)]


def dense_visibility(parents: Sequence[int]) -> Tensor:
    """Return bool [n, n]: node i sees node j."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def pack_bits(dense: Tensor, words: int) -> Tensor:
    """Return int64 [n, words]: bit j % 64 of word j // 64."""
    count = dense.shape[0]
    padded = torch.zeros(count, words * 64, dtype=torch.int64)
    padded[:, : dense.shape[1]] = dense
    return (padded.view(count, words, 64) << torch.arange(64)).sum(-1)


def make_case(shape: Shape, device: torch.device) -> Case:
    """Draw a case. Every pool slot that no request uses holds NaN."""
    batch = len(shape.prefixes)
    counts = [shape.nodes] * batch if isinstance(shape.nodes, int) else list(shape.nodes)
    total, size = sum(counts), shape.page_size
    pages = [-(-prefix // size) for prefix in shape.prefixes]
    pool = torch.full((sum(pages) + SPARE_SLOTS, size, ROW_DIM), float("nan"), device=device).to(
        shape.pool
    )
    order = torch.randperm(pool.shape[0], device=device)[: sum(pages)]
    prefix_slots = []
    for entries, prefix in zip(order.split(pages), shape.prefixes, strict=True):
        slots = (entries[:, None] * size + torch.arange(size, device=device)).flatten()[:prefix]
        values = torch.randn(prefix, ROW_DIM, device=device) / shape.kv_scale
        if shape.pool == torch.float8_e4m3fn:
            values.clamp_(-E4M3_MAX, E4M3_MAX)  # torch makes NaN of what is far above
        pool.view(-1, ROW_DIM)[slots] = values.to(shape.pool)
        prefix_slots.append(slots)
    dense = [dense_visibility(random_parents(count, shape.tree)) for count in counts]
    words = (max(counts) + 63) // 64
    visible = torch.cat([pack_bits(seen, words) for seen in dense])
    q = torch.randn(total, shape.heads, ROW_DIM, device=device) * shape.query_scale
    arguments: dict[str, Tensor | float | int | None] = {
        "q": q.bfloat16(),
        "kv_pool": pool if size > 1 else pool.view(-1, ROW_DIM),
        "kv_indptr": row_pointer(shape.prefixes, device),
        "kv_indices": order.to(shape.indices),
        "tree_kv": torch.randn(total, ROW_DIM, device=device).bfloat16(),
        "visible": None if shape.tree == "causal" else visible.to(device),
        "kv_scale": shape.kv_scale,
    }
    if size > 1:
        arguments["page_indptr"] = row_pointer(pages, device)
    if not isinstance(shape.nodes, int):
        arguments |= {"q_indptr": row_pointer(counts, device), "max_nodes": max(counts)}
    return Case(shape, arguments, counts, prefix_slots, [seen.to(device) for seen in dense])


def row_pointer(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return int32 [n + 1], the running sum of lengths."""
    sums = torch.tensor([0, *lengths]).cumsum(0)
    return sums.to(torch.int32).to(device)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference over the norm of the reference; NaN stays NaN."""
    return float((value.float() - reference).norm() / reference.norm())


def row_errors(value: Tensor, reference: Tensor) -> Tensor:
    """Return the relative error of each row [..., d]; that of a row of zeros is its norm."""
    norms = reference.norm(dim=-1)
    return (value.float() - reference).norm(dim=-1) / torch.where(norms > 0, norms, 1.0)
