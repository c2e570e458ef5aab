"""Node counts: one verify graph each, and the choice among them."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from longleaf.ddtree.budget import BudgetController, StepCosts

logger = logging.getLogger(__name__)


class Budget(Protocol):
    """What `longleaf.ddtree.budget.BudgetController` offers."""

    def choose(self, context: int, batch: int) -> int:
        """Return the node count for a step of `batch` requests of `context` tokens on average."""

    def observe(
        self,
        width: int,
        accepted: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Learn the drafts that each request of a step of that width accepted, and their nodes."""


class WidthPolicy:
    """Chooses a step's node count from what all ranks know alike: host-side lengths and results.

    Nothing measured on one rank, no clock and no random number enters the choice, so ranks in
    lockstep agree without a message.
    """

    def __init__(self, nodes: Sequence[int], grammar_nodes: int, budget: Budget | None) -> None:
        if len(nodes) > 1 and budget is None:
            raise ValueError("several node counts need a budget that chooses")
        self.nodes = tuple(sorted(nodes))
        allowed = [count for count in self.nodes if count <= grammar_nodes]
        self._grammar_nodes = max(allowed, default=self.nodes[0])
        self._budget = budget

    def choose(self, contexts: Sequence[int], has_grammar: bool) -> int:
        """Return the node count for requests of these context lengths."""
        width = self.nodes[-1]
        if self._budget is not None and len(self.nodes) > 1:
            mean = sum(contexts) // max(1, len(contexts))
            width = self._budget.choose(mean, len(contexts))
        return min(width, self._grammar_nodes) if has_grammar else width

    @property
    def wants_paths(self) -> bool:
        """Whether there is a choice for accepted nodes to inform."""
        return self._budget is not None

    def observe(
        self,
        width: int,
        accepted: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Report a step's accepted drafts, once they are on the CPU."""
        if self._budget is not None:
            self._budget.observe(width, accepted, paths)


class VerifyRunner(NamedTuple):
    """What the target runs a verify of one node count with."""

    attn_backend: Any
    graph_runner: Any


class VerifyRunners:
    """The verify graphs of the target, by node count; one of them is in place at a time.

    SGLang's runner keeps its attention backend and its graph runner in two attributes. Each node
    count has a backend object of its own, for the buffers that its graphs read are the backend's.
    """

    def __init__(self, model_runner: Any) -> None:
        self._model_runner = model_runner
        self._runners: dict[int, VerifyRunner] = {}

    def build(self, nodes: Sequence[int], captured: int, graphs: bool) -> None:
        """Capture the graphs that SGLang has not captured yet: all but those of `captured` nodes.

        Without graphs, one backend serves every node count. Widest first, for graphs then share
        the memory of the larger one.
        """
        runner = self._model_runner
        first = VerifyRunner(runner.attn_backend, runner.decode_cuda_graph_runner)
        for count in sorted(nodes, reverse=True):
            if count == captured or not graphs:
                self._runners[count] = first
                continue
            self._runners[count] = self._capture(count, captured)
        self.activate(max(nodes))

    def _capture(self, count: int, captured: int) -> VerifyRunner:
        runner = self._model_runner
        before = runner.attn_backend, runner.decode_cuda_graph_runner, runner.init_new_workspace
        logger.info("DDTREE: capturing verify graphs of %d nodes", count)
        with spec_width(count, captured):
            try:
                backend = runner._get_attention_backend(init_new_workspace=True)
                runner.attn_backend = backend
                graph_runner_class = runner._decode_cuda_graph_runner_cls()
                graph_runner = graph_runner_class(
                    runner, attn_backend=backend, speculative_num_draft_tokens=count
                )
            finally:
                (
                    runner.attn_backend,
                    runner.decode_cuda_graph_runner,
                    runner.init_new_workspace,
                ) = before
        if graph_runner.captured_req_width != count:
            raise RuntimeError(
                f"captured graphs of {graph_runner.captured_req_width} rows a request, not {count}"
            )
        return VerifyRunner(backend, graph_runner)

    def activate(self, nodes: int) -> None:
        """Put the graphs of that node count in place. KeyError for one that was not built."""
        chosen = self._runners[nodes]
        self._model_runner.attn_backend = chosen.attn_backend
        self._model_runner.decode_cuda_graph_runner = chosen.graph_runner

    def holding(self, tokens: int, requests: int) -> int | None:
        """Return the least node count whose graphs hold so many rows of so many requests."""
        fit = [
            count
            for count, runner in self._runners.items()
            if count >= tokens
            and runner.graph_runner is not None
            and runner.graph_runner.captured_req_width == count
            and runner.graph_runner.max_bs >= requests
        ]
        return min(fit, default=None)

    @property
    def attn_backends(self) -> tuple[Any, ...]:
        """Every backend that a verify can run on."""
        return tuple({id(r.attn_backend): r.attn_backend for r in self._runners.values()}.values())


@contextmanager
def spec_width(tokens: int, otherwise: int) -> Iterator[None]:
    """Let what is built inside read `tokens` as speculative_num_draft_tokens."""
    from sglang.srt.runtime_context import get_context

    get_context().override("longleaf.width", speculative_num_draft_tokens=tokens)
    try:
        yield
    finally:
        get_context().override("longleaf.width", speculative_num_draft_tokens=otherwise)


def make_budget(
    nodes: Sequence[int],
    depth: int,
    layers: int,
    measured: Sequence[tuple[int, int, float]] = (),
) -> Budget | None:
    """Return the adaptive budget over these node counts, or None where there is no choice.

    depth: drafted depths. measured: (nodes, context, milliseconds) of steps at batch 1.
    """
    if len(nodes) < 2:
        return None
    costs = StepCosts(
        layers=layers, measured={(count, context): ms for count, context, ms in measured}
    )
    return BudgetController(sorted(nodes), costs, depth=depth)
