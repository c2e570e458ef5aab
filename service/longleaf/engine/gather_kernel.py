"""One launch that turns requests' lengths into the row pointers and slots of their prefixes.

Imports Triton, so only `metadata.plan_prefix` imports it, for tensors on a GPU.
"""

# ruff: noqa: ANN001, ANN201, N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl

MAX_BATCH = 1024
"""Requests a launch; every block sums up all their lengths."""
PARTS = 64
"""Blocks a request: they share its prefix, so that one long request does not gather alone."""
BLOCK = 1024
"""Slots a block copies at a time."""


@triton.jit(do_not_specialize=["rows"])
def gather_prefix(
    req_to_token,
    row_stride,
    req_pool_indices,
    lengths,
    indptr,
    indices,
    rows,
    SHORTER: tl.constexpr,
    MAX_BATCH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (batch, PARTS). Requests from `rows` on are padding and have no prefix."""
    request = tl.program_id(0)
    part = tl.program_id(1)
    every = tl.arange(0, MAX_BATCH)
    real = every < rows
    length = tl.load(lengths + every, mask=real, other=0).to(tl.int32) - SHORTER
    length = tl.where(real & (length > 0), length, 0)
    first = tl.sum(tl.where(every < request, length, 0))
    own = tl.sum(tl.where(every == request, length, 0))
    if part == 0:
        tl.store(indptr + request + 1, first + own)
        if request == 0:
            tl.store(indptr, 0)
    source = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * row_stride
    start = part * BLOCK
    while start < own:
        token = start + tl.arange(0, BLOCK)
        inside = token < own
        slot = tl.load(source + token, mask=inside, other=0)
        tl.store(indices + first + token, slot, mask=inside)
        start += PARTS * BLOCK
