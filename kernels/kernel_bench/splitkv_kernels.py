# mypy: disable-error-code="no-untyped-def"
"""A plain split-KV verify kernel and its merge, in Triton: the obvious fix of today's path.

What an engineer would write first: nodes and heads of a request folded into the rows of tensor-core
tiles, the prefix cut into as many pieces as there are multiprocessors, the tree block one more
piece under its visibility bits, partial results in float32, and a second kernel that merges them.
The cached row is read once for scores and values both.
"""

import triton
import triton.language as tl


@triton.jit
def _attend(q, q_rope, k, k_rope, seen, scale_log2, top, total, sums):
    """Online softmax of one tile of keys; base-2 logarithms."""
    scores = tl.dot(q, tl.trans(k)) + tl.dot(q_rope, tl.trans(k_rope))
    scores = tl.where(seen, scores * scale_log2, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    sums = sums * decay[:, None] + tl.dot(weights.to(k.dtype), k)
    return new_top, total, sums


@triton.jit
def split_kernel(
    q_ptr,
    pool_ptr,
    indptr_ptr,
    indices_ptr,
    tree_ptr,
    visible_ptr,
    sums_ptr,
    lse_ptr,
    scale_log2,
    nodes,
    heads,
    words,
    CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Attend a row tile to one piece: piece SPLITS is the tree, the others are the prefix's."""
    request, split = tl.program_id(0), tl.program_id(2)
    row_dim: tl.constexpr = LATENT + ROPE
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < nodes * heads
    node = rows // heads
    out_rows = request.to(tl.int64) * nodes * heads + rows
    latent, rope = tl.arange(0, LATENT), LATENT + tl.arange(0, ROPE)
    q_rows = q_ptr + out_rows[:, None] * row_dim
    q = tl.load(q_rows + latent[None, :], mask=live[:, None], other=0.0)
    q_rope = tl.load(q_rows + rope[None, :], mask=live[:, None], other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, LATENT], tl.float32)

    first = tl.load(indptr_ptr + request)
    length = tl.load(indptr_ptr + request + 1) - first
    piece = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * piece
    end = tl.minimum(begin + piece, length)
    token = begin + tl.arange(0, BLOCK_N)
    # Slots are read one tile ahead: a row's address then never waits for them.
    slot = tl.load(indices_ptr + first + token, mask=token < end, other=0)
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        valid = token < end
        k_rows = pool_ptr + slot.to(tl.int64)[:, None] * row_dim
        token += BLOCK_N
        slot = tl.load(indices_ptr + first + token, mask=token < end, other=0)
        k = tl.load(k_rows + latent[None, :], mask=valid[:, None], other=0.0)
        k_rope = tl.load(k_rows + rope[None, :], mask=valid[:, None], other=0.0)
        top, total, sums = _attend(
            q, q_rope, k, k_rope, valid[None, :], scale_log2, top, total, sums
        )
    tree_end = tl.where(split == SPLITS, nodes, 0)
    for start in range(0, tree_end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        valid = token < nodes
        k_rows = tree_ptr + (request.to(tl.int64) * nodes + token[:, None]) * row_dim
        k = tl.load(k_rows + latent[None, :], mask=valid[:, None], other=0.0)
        k_rope = tl.load(k_rows + rope[None, :], mask=valid[:, None], other=0.0)
        if CAUSAL:
            seen = token[None, :] <= node[:, None]
        else:
            word = visible_ptr + (request * nodes + node[:, None]) * words + token[None, :] // 64
            bits = tl.load(word, mask=live[:, None] & valid[None, :], other=0)
            seen = ((bits >> (token[None, :] % 64)) & 1) != 0
        seen = seen & valid[None, :]
        top, total, sums = _attend(q, q_rope, k, k_rope, seen, scale_log2, top, total, sums)

    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), top + tl.log2(safe))
    at = out_rows * (SPLITS + 1) + split
    tl.store(lse_ptr + at, lse, mask=live)
    tl.store(
        sums_ptr + at[:, None] * LATENT + latent[None, :], sums / safe[:, None], mask=live[:, None]
    )


@triton.jit
def merge_kernel(
    sums_ptr,
    lse_ptr,
    out_ptr,
    PIECES: tl.constexpr,
    PADDED: tl.constexpr,
    STEP: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Combine the pieces of one row; PADDED is the power of two at or above PIECES."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    lse = tl.load(lse_ptr + row * PIECES + at, mask=at < PIECES, other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top), 0)
    latent = tl.arange(0, LATENT)
    out = tl.zeros([LATENT], tl.float32)
    for start in range(0, PIECES, STEP):
        piece = start + tl.arange(0, STEP)
        valid = piece < PIECES
        part = tl.load(lse_ptr + row * PIECES + piece, mask=valid, other=float("-inf"))
        weight = tl.exp2(part - top)
        sums = tl.load(
            sums_ptr + (row * PIECES + piece[:, None]) * LATENT + latent[None, :],
            mask=valid[:, None],
            other=0.0,
        )
        out += tl.sum(weight[:, None] * sums, 0)
    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * LATENT + latent, out.to(out_ptr.dtype.element_ty))
