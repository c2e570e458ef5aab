"""The plain split-KV Triton verify kernel as a contender, with its tuned shapes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_bench.cases import LATENT_DIM, ROW_DIM
from kernel_bench.inputs import SCALE, Inputs
from kernel_bench.splitkv_kernels import merge_kernel, split_kernel
from kernel_bench.splitkv_plan import SHAPES, Shape, plan
from kernel_bench.timing import Launch, Sample, microseconds


class SplitKv:
    """Prefix pieces, then a merge: two launches. Any numbers of nodes and heads; bfloat16."""

    def __init__(self, shape: Shape, processors: int) -> None:
        self._shape = shape
        self._processors = processors
        self.shared_bytes = 0
        """Shared memory of a block, known after the first launch."""

    def prepare(self, inputs: Inputs) -> Launch:
        """Return the launches on a layer; the result is in inputs.out."""
        problem, shape = inputs.problem, self._shape
        rows = problem.nodes * problem.heads
        split = plan(rows, problem.batch, self._processors, shape)
        pieces = split.prefix_pieces + 1
        every = problem.batch * rows
        sums = torch.empty(every, pieces, LATENT_DIM, device=inputs.q.device)
        lse = torch.empty(every, pieces, device=inputs.q.device)
        indices = inputs.indices.int()

        def launch(layer: Tensor) -> None:
            compiled = split_kernel[(problem.batch, split.row_tiles, pieces)](
                inputs.q,
                layer,
                inputs.indptr,
                indices,
                inputs.tree_kv,
                inputs.visible,
                sums,
                lse,
                SCALE * math.log2(math.e),
                problem.nodes,
                problem.heads,
                inputs.visible.shape[1],
                CAUSAL=problem.causal,
                SPLITS=split.prefix_pieces,
                BLOCK_M=shape.rows,
                BLOCK_N=shape.tokens,
                LATENT=LATENT_DIM,
                ROPE=ROW_DIM - LATENT_DIM,
                num_warps=shape.warps,
                num_stages=shape.stages,
            )
            self.shared_bytes = getattr(getattr(compiled, "metadata", None), "shared", 0)
            merge_kernel[(every,)](
                sums,
                lse,
                inputs.out,
                PIECES=pieces,
                PADDED=1 << (pieces - 1).bit_length(),
                STEP=8,
                LATENT=LATENT_DIM,
                num_warps=4,
            )

        return launch


@dataclass(frozen=True)
class Tuned:
    """One shape's time and its shared memory; why it did not run where it did not."""

    shape: Shape
    time: Sample | None
    shared_bytes: int
    why: str = ""


def tune(
    inputs: Inputs, layers: Sequence[Tensor], processors: int, shapes: Sequence[Shape] = SHAPES
) -> Iterator[Tuned]:
    """Time shapes on a problem; one that needs too much shared memory has no time."""
    from triton.runtime.errors import OutOfResources

    for shape in shapes:
        contender = SplitKv(shape, processors)
        try:
            time = microseconds(contender.prepare(inputs), layers, replays=5)
        except OutOfResources as error:
            yield Tuned(shape, None, 0, str(error))
        else:
            yield Tuned(shape, time, contender.shared_bytes)


def fastest(results: Sequence[Tuned], shared_limit: int | None = None) -> Tuned | None:
    """The fastest shape that ran within a limit of shared memory, bytes."""
    fitting = [
        result
        for result in results
        if result.time and (shared_limit is None or result.shared_bytes <= shared_limit)
    ]
    return min(fitting, key=lambda item: item.time.median if item.time else 0.0, default=None)
