"""This project's kernel as a contender."""

from torch import Tensor

from kernel_bench.inputs import SCALE, Inputs
from kernel_bench.timing import Launch
from longleaf_kernels.verify import verify_mla, verify_workspace


class Longleaf:
    """verify_mla for trees, decode and causal extends alike."""

    def __init__(self, workspace: Tensor) -> None:
        self._workspace = workspace

    @classmethod
    def on(cls, inputs: Inputs) -> "Longleaf":
        """With a workspace of its own."""
        return cls(verify_workspace(inputs.q.device))

    def prepare(self, inputs: Inputs) -> Launch:
        """Return the launch on a layer; the result is in inputs.out."""
        indices = inputs.indices.int()
        visible = None if inputs.problem.causal else inputs.visible

        def launch(layer: Tensor) -> None:
            verify_mla(
                inputs.q,
                layer,
                inputs.indptr,
                indices,
                inputs.tree_kv,
                visible,
                scale=SCALE,
                workspace=self._workspace,
                out=inputs.out,
            )

        return launch
