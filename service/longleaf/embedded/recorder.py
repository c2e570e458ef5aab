"""Writes what steps did into the engine's metric families, and keeps the last draft trees."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from longleaf.ddtree import Tree
from longleaf.embedded.step import PhaseSeconds, StepResult
from longleaf.metrics import STEP_PHASES, EngineMetrics, context_bucket

_KEPT_TREES = 8


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """A tree, the nodes of it that were accepted, the tokens before it, and when (Unix seconds)."""

    time: float
    context: int
    tree: Tree
    path: tuple[int, ...]


class Recorder:
    """One observation per request and step, labelled with the context bucket of its prefix."""

    def __init__(self, metrics: EngineMetrics, window: int | None = None) -> None:
        self._metrics = metrics
        self.trees: Sequence[VerifiedTree] = ()
        """The last ones, oldest first; replaced, never changed, so that any thread may read it."""
        if window is not None:
            metrics.drafter_window_tokens.set(window)

    def kv_read(self, count: int) -> None:
        """Count ``count`` bytes of latent rows read."""
        self._metrics.kv_read_bytes.inc(count)

    def verify(self, kv_bytes: int, seconds: float) -> None:
        """Count one verify forward, of however many requests."""
        self._metrics.timed_verify_bytes.inc(kv_bytes)
        self._metrics.timed_verify_seconds.inc(seconds)

    def step(self, result: StepResult, seconds: PhaseSeconds, *, plain: bool = False) -> None:
        """Observe one request's step. The phases are the batch's: every request in it waited for
        them. plain: nothing was drafted for any of them.
        """
        metrics, bucket = self._metrics, context_bucket(result.context)
        metrics.commit_len.labels(bucket).observe(result.outcome.commit_len)
        metrics.accepted_depth.labels(bucket).observe(result.outcome.accepted_depth)
        metrics.tree_nodes.labels(bucket).observe(result.nodes)
        if result.span is not None:
            metrics.drafter_span_tokens.labels(bucket).observe(result.span)
        for phase in STEP_PHASES:
            metrics.step_seconds.labels(phase, bucket).observe(getattr(seconds, phase))
        metrics.timed_context_tokens.labels(bucket).inc(result.context)
        if result.tree is not None and len(result.tree) > 1:
            latest = VerifiedTree(time.time(), result.context, result.tree, result.path)
            self.trees = (*self.trees[1 - _KEPT_TREES :], latest)
        if plain:
            metrics.plain_step_seconds.labels(bucket).observe(seconds.total)

    def pool(self, used: int, cached: int, free: int) -> None:
        """Set the pool's slots by state."""
        gauge = self._metrics.kv_pool_tokens
        gauge.labels("used").set(used)
        gauge.labels("cached").set(cached)
        gauge.labels("free").set(free)
