"""One launch that turns accepted paths into what a step commits and where its rows lie.

Imports Triton, so only `accept.committed` imports it, for tensors on a GPU.
"""

# ruff: noqa: ANN001, ANN201, N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl

MAX_COLUMNS = 128
"""Columns of a path or of a request's tokens; a block holds them all."""


@triton.jit(do_not_specialize=["nodes", "max_path", "stride"])
def commit_paths(
    tree_tokens,
    path,
    path_len,
    bonus,
    prefix_lens,
    slots,
    tokens,
    seq_lens,
    rows,
    positions,
    path_slots,
    nodes,
    max_path,
    stride,
    COLUMNS: tl.constexpr,
):
    """Grid (batch,). Reads trees, paths and slots; writes the fields of `accept.Committed`."""
    request = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    length = tl.load(path_len + request)
    prefix = tl.load(prefix_lens + request).to(tl.int64)
    root = request.to(tl.int64) * nodes
    steps = path + request * max_path

    here = column < max_path
    node = tl.maximum(tl.load(steps + column, mask=here, other=0), 0)
    cell = request * max_path + column
    tl.store(rows + cell, root + node, mask=here)
    tl.store(positions + cell, prefix + column, mask=here)
    slot = tl.load(slots + root + column, mask=here, other=0)
    tl.store(path_slots + cell, slot, mask=here)

    drafted = column + 1 < length
    child = tl.maximum(tl.load(steps + column + 1, mask=drafted, other=0), 0)
    token = tl.load(tree_tokens + root + child, mask=drafted, other=0)
    token = tl.where(column + 1 == length, tl.load(bonus + request), token)
    tl.store(tokens + request * stride + column, token, mask=column < stride)
    tl.store(seq_lens + request, prefix + length)
