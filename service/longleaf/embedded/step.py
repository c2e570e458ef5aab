"""One decode step of a batch: draft, build, verify, accept, compact."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longleaf.ddtree import (
    Accepted,
    StepOutcome,
    Tree,
    accept_greedy,
    accept_sampled,
    ancestor_bits,
    build_tree,
    committed_tokens,
    compaction_plan,
    dense_mask,
    positions,
    shorten,
    step_outcome,
    top_k_marginals,
)
from longleaf.embedded.drafter import DraftAnchor
from longleaf.embedded.memory import KvMemory
from longleaf.embedded.model_set import Models
from longleaf.embedded.options import SpeculativeOptions
from longleaf.embedded.request import Finish, RequestState
from longleaf.embedded.sampling import TokenLogprob, position_uniforms, token_logprobs
from longleaf.embedded.slots import Slots
from longleaf.embedded.target import Segment

_NO_CANDIDATES = np.empty((0, 1))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave one request.

    ``context``: prefix length in tokens when the step began. ``nodes``: rows verified. ``span``:
    context rows that the drafter's windowed layers read, None when nothing was drafted. ``tree``
    and ``path``: the tree, and the nodes of it that were accepted.
    """

    state: RequestState
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None
    outcome: StepOutcome
    context: int
    nodes: int
    span: int | None
    tree: Tree | None = None
    path: tuple[int, ...] = ()


@dataclass(slots=True)
class PhaseSeconds:
    """Wall time of a step's phases in seconds, of the whole batch."""

    draft: float = 0.0
    build: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    compact: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return self.draft + self.build + self.verify + self.accept + self.compact


@dataclass(slots=True)
class _Planned:
    """One request on its way through a step."""

    state: RequestState
    context: int
    depth: int
    budget: int
    tree: Tree
    span: int | None = None
    slots: Slots | None = None


class DecodeStep:
    """Runs decode steps. A request without speculation takes the same way with a tree of its root
    alone.
    """

    def __init__(self, models: Models, memory: KvMemory, options: SpeculativeOptions) -> None:
        self._models = models
        self._memory = memory
        self._options = options
        self._max_depth = 0
        if models.drafter is not None and options.enabled:
            block = models.drafter.config.block_size
            self._max_depth = min(options.block or block, block) - 1

    def rows_needed(self, state: RequestState) -> int:
        """Slots that the next step of ``state`` takes at most: the root and its drafted nodes."""
        depth = self._depth(state)
        return 1 + (self._options.budget if depth else 0)

    def _depth(self, state: RequestState) -> int:
        """Deepest draft worth verifying: the bonus token is the last one the answer may get."""
        return min(self._max_depth, state.remaining - 1) if state.request.speculative else 0

    def verify(
        self, batch: Sequence[RequestState], available: int, seconds: PhaseSeconds
    ) -> "VerifiedBatch":
        """Draft, build and verify the trees of ``batch`` in one target forward.

        ``available`` bounds the slots of all trees together (at least one each). On an exception
        nothing has changed: the step's slots are free again and no request has moved.
        """
        spare = available - len(batch)
        plans: list[_Planned] = []
        for state in batch:
            budget = min(self.rows_needed(state) - 1, spare)
            spare -= budget
            depth = self._depth(state) if budget else 0
            root = _root_only(int(state.tokens[state.length - 1]))
            plans.append(_Planned(state, state.length - 1, depth, budget, root))
        mark = time.perf_counter()
        marginals = self._draft([plan for plan in plans if plan.depth])
        mark, seconds.draft = _lap(mark)
        for plan, logits in marginals:
            temperature = plan.state.request.sampling.temperature
            scaled = logits if plan.state.request.sampling.greedy else logits / temperature
            width = min(self._options.topk, scaled.shape[1])
            tokens, log_probs = top_k_marginals(scaled[: plan.depth], width)
            plan.tree = build_tree(
                int(plan.tree.tokens[0]), tokens, log_probs, plan.budget, self._options.seed_chain
            )
        mark, seconds.build = _lap(mark)
        try:
            batch_logits = self._forward(plans)
        except Exception:
            for plan in plans:
                if plan.slots is not None:
                    self._memory.release(plan.slots)
            raise
        seconds.verify = _lap(mark)[1]
        return batch_logits

    def _draft(self, plans: list[_Planned]) -> list[tuple[_Planned, NDArray[np.float32]]]:
        drafter = self._models.drafter
        if drafter is None or not plans:
            return []
        anchors = [
            DraftAnchor(int(plan.tree.tokens[0]), plan.context, plan.state.kv.slots)
            for plan in plans
        ]
        output = drafter.draft(anchors, self._models.pool)
        for plan, span in zip(plans, output.span_tokens, strict=True):
            plan.span = int(span)
        return list(zip(plans, output.logits, strict=True))

    def _forward(self, plans: list[_Planned]) -> "VerifiedBatch":
        segments = []
        for plan in plans:
            size = len(plan.tree)
            plan.slots = self._memory.allocate(size)
            visible = dense_mask(ancestor_bits(plan.tree), size)
            segments.append(
                Segment(
                    plan.tree.tokens,
                    positions(plan.tree, plan.context),
                    plan.slots,
                    plan.state.kv.slots,
                    visible,
                )
            )
        output = self._models.target.forward(segments, self._models.pool)
        logits = self._models.target.logits(output.hidden)
        ends = np.cumsum([len(plan.tree) for plan in plans])
        rows = [slice(end - len(plan.tree), end) for end, plan in zip(ends, plans, strict=True)]
        return VerifiedBatch(
            [
                VerifiedTree(plan, logits[row], output.features[row])
                for plan, row in zip(plans, rows, strict=True)
            ],
            output.kv_bytes_read,
        )

    def accept(self, verified: "VerifiedTree") -> tuple[Accepted, Finish | None]:
        """Walk the tree, commit the tokens to the request's state, and cut the walk where the
        answer ends.
        """
        state, tree = verified.state, verified.plan.tree
        if not np.isfinite(verified.logits).all():
            raise FloatingPointError("the target's logits are not finite")
        sampling = state.request.sampling
        if sampling.greedy:
            accepted = accept_greedy(tree, verified.logits.argmax(axis=1))
        else:
            uniforms = position_uniforms(
                state.request.seed, state.length, int(tree.depths.max()) + 1
            )
            accepted = accept_sampled(tree, verified.logits, sampling, uniforms)
        for count, token in enumerate(committed_tokens(tree, accepted), start=1):
            finish = state.commit(token, self._models.eos_ids)
            if finish is not None:
                return shorten(tree, accepted, count), finish
        return accepted, None

    def compact(
        self, verified: "VerifiedTree", accepted: Accepted, finish: Finish | None
    ) -> StepResult:
        """Move the accepted rows together, give back the others, and extend the draft
        K/V by them.
        """
        plan = verified.plan
        state, slots, path = plan.state, plan.slots, accepted.path
        assert slots is not None
        moves = compaction_plan(path)
        if len(moves):
            self._models.pool.move(slots[moves.src], slots[moves.dst])
        kept, rest = slots[: len(path)], slots[len(path) :]
        plan.slots = None
        state.kv.append(kept)
        self._memory.release(rest)
        if self._models.drafter is not None and state.request.speculative:
            span = np.arange(plan.context, plan.context + len(path), dtype=np.int64)
            self._models.drafter.extend(verified.features[path], span, kept, self._models.pool)
        outcome = step_outcome(accepted)
        state.stats.add(outcome, len(plan.tree) - 1)
        tokens = committed_tokens(plan.tree, accepted)
        logprobs: list[TokenLogprob] = []
        if state.request.logprobs is not None:
            logprobs = token_logprobs(verified.logits[path], tokens, state.request.logprobs)
        return StepResult(
            state,
            tuple(tokens),
            tuple(logprobs),
            finish,
            outcome,
            plan.context,
            len(plan.tree),
            plan.span,
            plan.tree,
            tuple(path.tolist()),
        )

    def discard(self, verified: "VerifiedTree") -> None:
        """Give back the step's slots of a request that failed before or within ``compact``."""
        if verified.plan.slots is not None:
            self._memory.release(verified.plan.slots)
            verified.plan.slots = None


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """A verified tree: ``logits`` float32 [n, V] and drafter ``features`` float32 [n, taps *
    hidden] of its nodes.
    """

    plan: _Planned
    logits: NDArray[np.float32]
    features: NDArray[np.float32]

    @property
    def state(self) -> RequestState:
        """The request that the tree belongs to."""
        return self.plan.state


@dataclass(frozen=True, slots=True)
class VerifiedBatch:
    """The trees of one verify forward, and the bytes of latent rows that it read."""

    trees: list[VerifiedTree]
    kv_bytes_read: int


def _root_only(token: int) -> Tree:
    return build_tree(token, _NO_CANDIDATES.astype(np.int64), _NO_CANDIDATES, 0)


def _lap(mark: float) -> tuple[float, float]:
    now = time.perf_counter()
    return now, now - mark
