"""What the target verifies in one step: a tree of nodes a request, with its visibility bits."""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor

from longleaf_kernels._tree import WORD_BITS, DraftTrees


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """DFLASH's verify input for trees.

    visible: int64[batch, nodes, ceil(nodes / 64)], as `DraftTrees` has it; the attention backend
    copies it to the buffer that its graphs read, in `init_forward_metadata_out_graph`. The
    node's positions are prefix + depth, and draft_token_num is the node count.
    """

    visible: Tensor | None = None


def verify_input(trees: DraftTrees) -> DDTreeVerifyInput:
    """Return the input that verifies these trees."""
    nodes = trees.tokens.shape[1]
    made: Any = DDTreeVerifyInput(
        draft_token=trees.tokens.reshape(-1),
        positions=trees.positions.reshape(-1),
        draft_token_num=nodes,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        visible=trees.visible,
    )
    return made  # type: ignore[no-any-return]


class RootTrees:
    """Trees of the root alone, for steps that do not speculate; made of constants and views."""

    def __init__(self, max_batch: int, device: torch.device | str) -> None:
        self._reserve(max(1, max_batch), device)

    def _reserve(self, batch: int, device: torch.device | str) -> None:
        self.parents = torch.full((batch, 1), -1, dtype=torch.int32, device=device)
        self.depths = torch.zeros(batch, 1, dtype=torch.int32, device=device)
        self.visible = torch.ones(batch, 1, 1, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(batch, 1, dtype=torch.float64, device=device)
        self.count = torch.ones(batch, dtype=torch.int32, device=device)

    def __call__(self, root_tokens: Tensor, prefix_lens: Tensor) -> DraftTrees:
        """Return the trees of these roots, int64[batch], after prefixes of int64[batch] tokens."""
        batch = root_tokens.shape[0]
        if batch > self.count.shape[0]:
            self._reserve(batch, root_tokens.device)
        return DraftTrees(
            tokens=root_tokens.view(batch, 1),
            parents=self.parents[:batch],
            depths=self.depths[:batch],
            visible=self.visible[:batch],
            positions=prefix_lens.view(batch, 1),
            log_probs=self.log_probs[:batch],
            count=self.count[:batch],
        )


def visible_words(nodes: int) -> int:
    """Return the 64-bit words of one node's visibility."""
    return -(-nodes // WORD_BITS)
