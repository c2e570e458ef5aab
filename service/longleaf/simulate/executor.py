"""Runs a scheduler's batches without computing: tokens of a fixed text, times of a curve."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from longleaf.ddtree import StepOutcome
from longleaf.embedded.executor import Failure
from longleaf.embedded.loads import LoadCounters
from longleaf.embedded.memory import KvMemory
from longleaf.embedded.prefill import Chunk, PrefillResult
from longleaf.embedded.request import Finish, RequestState
from longleaf.embedded.step import StepResult
from longleaf.metrics import EngineMetrics, context_bucket
from longleaf.simulate.commits import CommitLengths
from longleaf.simulate.curve import Curve

EVICT_AT_LEAST = 4_096
"""Cached tokens that give way at a time: asking the cache at every step is most of the work."""
_NO_EOS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Pace:
    """``speed`` seconds of the curve pass in one second. ``default_text``: the kind of text of a
    request that names none. ``answer_tokens``: mean length of answers without ``max_tokens``.
    """

    speed: float = 1.0
    default_text: str = "prose"
    answer_tokens: float = 256.0


class SimulatedExecutor:
    """``elapsed``: seconds that the batches took since it was last set to 0, at the simulation's
    speed. ``answer``: the tokens that every answer repeats. ``free_tokens``: of a request, by its
    id, the first tokens of the prompt that take no time, as if they had been cached.
    """

    def __init__(
        self,
        curve: Curve,
        commits: CommitLengths,
        pace: Pace,
        answer: Sequence[int],
        memory: KvMemory,
        counters: LoadCounters,
        metrics: EngineMetrics | None,
    ) -> None:
        self._curve = curve
        self._commits = commits
        self._pace = pace
        self._answer = tuple(answer)
        self._memory = memory
        self._counters = counters
        self._metrics = metrics
        self.elapsed = 0.0
        self.free_tokens: dict[str, int] = {}

    def rows_needed(self, state: RequestState) -> int:
        """Slots that the next step of ``state`` takes at most."""
        return self._curve.nodes if state.request.speculative and state.remaining > 1 else 1

    def prefill(self, chunks: Sequence[Chunk]) -> tuple[list[PrefillResult], list[Failure]]:
        """Give each request its chunk's rows, and its first token with the last of them."""
        spans = [span for chunk in chunks if (span := self._span(chunk))]
        seconds = self._curve.prefill_seconds(spans) / self._pace.speed if spans else 0.0
        self.elapsed += seconds
        self._counters.add_prefill(sum(len(chunk.slots) for chunk in chunks), seconds)
        return [self._finish_chunk(chunk) for chunk in chunks], []

    def _span(self, chunk: Chunk) -> tuple[int, int] | None:
        """The tokens of a chunk that take time."""
        begin = chunk.state.kv.length
        end = begin + len(chunk.slots)
        first = max(begin, self.free_tokens.get(chunk.state.rid, 0))
        return (first, end) if first < end else None

    def _finish_chunk(self, chunk: Chunk) -> PrefillResult:
        state = chunk.state
        state.kv.append(chunk.slots)
        if state.kv.length < state.prompt_len or state.completion_len:
            return PrefillResult(state, (), (), None)
        if state.request.max_tokens is None:
            state.max_tokens = min(state.max_tokens, self._drawn_length(state))
        token, finish = self._commit(state)
        return PrefillResult(state, (token,), (), finish)

    def step(self, batch: Sequence[RequestState]) -> tuple[list[StepResult], list[Failure]]:
        """Commit as many tokens to each request as its kind of text gets in a step."""
        seconds = self._curve.step_seconds([state.length - 1 for state in batch])
        seconds /= self._pace.speed
        self.elapsed += seconds
        spare = self._memory.available - len(batch)
        results = []
        for state in batch:
            nodes = 1 + min(self.rows_needed(state) - 1, spare)
            spare -= nodes - 1
            results.append(self._step(state, nodes))
        self._counters.add_step(len(batch), seconds, sum(len(one.tokens) for one in results))
        for result in results:
            self._record(result, seconds)
        return results, []

    def _step(self, state: RequestState, nodes: int) -> StepResult:
        context = state.length - 1
        drafts = min(self._accepted(state), nodes - 1, state.remaining - 1)
        tokens: list[int] = []
        finish: Finish | None = None
        while len(tokens) <= drafts and finish is None:
            token, finish = self._commit(state)
            tokens.append(token)
        state.kv.append(self._memory.allocate(len(tokens)))
        accepted = len(tokens) - 1
        outcome = StepOutcome(accepted, accepted, accepted + 1)
        state.stats.add(outcome, nodes - 1)
        return StepResult(state, tuple(tokens), (), finish, outcome, context, nodes, None)

    def _commit(self, state: RequestState) -> tuple[int, Finish | None]:
        token = self._answer[state.completion_len % len(self._answer)]
        return token, state.commit(token, _NO_EOS)

    def _accepted(self, state: RequestState) -> int:
        if not state.request.speculative:
            return 0
        kind = state.request.text
        if kind not in self._commits.cumulative:
            kind = self._pace.default_text
        return self._commits.drafts(kind, _uniform(state, state.length))

    def _drawn_length(self, state: RequestState) -> int:
        """Exponential: like real answers, most are short and a few are long."""
        return max(1, round(-self._pace.answer_tokens * math.log1p(-_uniform(state, 0))))

    def _record(self, result: StepResult, seconds: float) -> None:
        if result.state.request.speculative:
            self._counters.add_outcome(result.outcome, result.nodes - 1)
        metrics = self._metrics
        if metrics is None:
            return
        bucket = context_bucket(result.context)
        metrics.commit_len.labels(bucket).observe(result.outcome.commit_len)
        metrics.accepted_depth.labels(bucket).observe(result.outcome.accepted_depth)
        metrics.tree_nodes.labels(bucket).observe(result.nodes)
        metrics.step_seconds.labels("total", bucket).observe(seconds)
        metrics.timed_context_tokens.labels(bucket).inc(result.context)


def _uniform(state: RequestState, position: int) -> float:
    """In [0, 1), of the request's seed and a position: the same in whatever batch."""
    key = f"{state.request.seed} {position}".encode()
    return (int.from_bytes(blake2b(key, digest_size=8).digest()) >> 11) * 2.0**-53
