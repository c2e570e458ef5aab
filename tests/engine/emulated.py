"""The engine's modules on the CPU: the real SGLang below, the kernels compiled by g++ beside."""

import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("torch")
if find_spec("sglang") is None:
    pytest.skip("needs the sglang wheel: make test-engine", allow_module_level=True)

from tests.engine import stubs

stubs.install()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang says at import what a CPU cannot do
    import longleaf.engine.worker  # noqa: F401

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from longleaf.engine import accept, compaction, draft_head, worker  # noqa: E402
from longleaf_kernels._tree import Marginals, launch_build_tree  # noqa: E402
from longleaf_kernels.eager import CompactPlan  # noqa: E402
from tests.kernels.conftest import emulated_library  # noqa: E402
from tests.kernels.operators import EmulatedOperators  # noqa: E402

__all__ = ["emulated_library", "kernels"]


class EngineKernels(EmulatedOperators):
    """The emulated operators under the signatures that the engine calls."""

    def plan(self, pools: Sequence[Tensor]) -> Callable[..., None]:
        """`CompactPlan`: the real one's checks and launch, on the emulator."""
        made = CompactPlan(pools)

        def compact(slots: Tensor, path: Tensor, path_len: Tensor) -> None:
            self._shuffle()
            made.launch(self._library, 0, slots, path, path_len)

        return compact

    def top_k_marginals(self, logits: Tensor, k: int, workspace: Tensor) -> Marginals:
        del workspace
        self._shuffle()
        _, marginals = launch_build_tree(self._library, 0, logits, None, None, self._workspace, k)
        return marginals

    def expand(
        self,
        tokens: Tensor,
        log_probs: Tensor,
        roots: Tensor,
        budget: int,
        seed_chain: bool,
        prefix_lens: Tensor,
    ) -> Any:
        return self.expand_tree(tokens, log_probs, roots, prefix_lens, budget, seed_chain)

    def sampled(
        self,
        tokens: Tensor,
        parents: Tensor,
        depths: Tensor,
        logits: Tensor,
        sampling: Any,
        uniforms: Tensor,
        workspace: Tensor,
    ) -> Any:
        del workspace
        trees: Any = _Walked(tokens, parents, depths)
        return self.accept_sampled(trees, logits, sampling, uniforms, every_node=True)


class _Walked:
    def __init__(self, tokens: Tensor, parents: Tensor, depths: Tensor) -> None:
        self.tokens, self.parents, self.depths = tokens, parents, depths


def _no_workspace(*args: Any, **kwargs: Any) -> Tensor:
    del args, kwargs
    return torch.zeros(1, dtype=torch.uint8)


@pytest.fixture
def kernels(
    emulated_library: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> EngineKernels:
    """Let the engine's modules run the kernels on the CPU."""
    made = EngineKernels(emulated_library)
    monkeypatch.setattr(accept, "accept_greedy", made.accept_greedy)
    monkeypatch.setattr(accept, "accept_sampled", made.sampled)
    monkeypatch.setattr(accept, "accept_workspace", _no_workspace)
    monkeypatch.setattr(compaction, "CompactPlan", made.plan)
    monkeypatch.setattr(draft_head, "top_k_marginals", made.top_k_marginals)
    monkeypatch.setattr(draft_head, "build_tree_workspace", _no_workspace)
    monkeypatch.setattr(worker, "expand_tree", made.expand)
    return made
