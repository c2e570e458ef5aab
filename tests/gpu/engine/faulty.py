"""A plugin that registers ours and then plants one fault, or only watches: for tests alone.

SGLang loads it instead of ours where SGLANG_PLUGINS says so; LONGLEAF_TEST_FAULT names the fault.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ops.gpu.ranks import watch

FAULT = "LONGLEAF_TEST_FAULT"


def register() -> None:
    """The entry point."""
    from longleaf.engine.plugin import register as register_ours

    register_ours()
    PLANTS[os.environ[FAULT]]()


def _causal_mask() -> None:
    """Graphs replay the mask of a chain, whatever the tree."""
    backend: Any = import_module("longleaf.engine.backend")
    backend.LongleafMlaBackend._bits = lambda self, batch, nodes, rows: None


def _positions_by_node() -> None:
    """A node's position is prefix + its index, not prefix + its depth."""
    import torch

    worker: Any = import_module("longleaf.engine.worker")
    make = worker.verify_input

    def shifted(trees: Any) -> Any:
        index = torch.arange(trees.positions.shape[1], device=trees.positions.device)
        return make(trees._replace(positions=trees.positions[:, :1] + index))

    worker.verify_input = shifted


def _stale_padding() -> None:
    """A batch that a graph pads keeps the visibility of the replay before."""
    backend: Any = import_module("longleaf.engine.backend")
    fill = backend.fill_visible

    def stale(target: Any, bits: Any, rows: int, fixed: Any) -> None:
        requests = target.shape[0] // fixed.own.shape[0]
        if bits is None or rows == requests:
            fill(target, bits, rows, fixed)

    backend.fill_visible = stale


def _draft_not_cropped() -> None:
    """The drafter goes on seeing rows behind the committed prefix: what a step before rejected."""
    worker: Any = import_module("longleaf.engine.worker")
    draft = worker.DDTreeWorker._draft

    def uncropped(self: Any, batch: Any, draft_input: Any, prefix_lens: Any) -> Any:
        return draft(self, batch, draft_input, prefix_lens + int(self.block_size) // 2)

    worker.DDTreeWorker._draft = uncropped


def _window_ignored() -> None:
    """The drafter's windowed layers attend to the whole prefix."""
    dflash: Any = import_module("sglang.srt.models.dflash")
    parameters = dflash._get_dflash_layer_attention_params

    def unbounded(config: Any, layer_id: int) -> tuple[int, Any]:
        return -1, parameters(config, layer_id)[1]

    dflash._get_dflash_layer_attention_params = unbounded


def _rank_different_trees() -> None:
    """Rank 1 takes other candidates than rank 0."""
    worker: Any = import_module("longleaf.engine.worker")
    watch()
    draft = worker.DDTreeWorker._draft

    def differing(self: Any, *arguments: Any) -> Any:
        marginals = draft(self, *arguments)
        if self.ps.tp_rank == 0:
            return marginals
        return marginals._replace(tokens=marginals.tokens.roll(1, dims=-1))

    worker.DDTreeWorker._draft = differing


PLANTS: dict[str, Callable[[], None]] = {
    "none": watch,
    "causal-mask": _causal_mask,
    "positions-by-node": _positions_by_node,
    "stale-padding": _stale_padding,
    "draft-not-cropped": _draft_not_cropped,
    "window-ignored": _window_ignored,
    "rank-different-trees": _rank_different_trees,
}
