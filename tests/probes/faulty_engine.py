"""The embedded engine with one fault planted: ``python -m tests.probes.faulty_engine FAULT …``."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from longleaf.cli import main
from longleaf.ddtree import Accepted, StepOutcome, Tree, accept_greedy, shorten
from longleaf.embedded import step
from longleaf.embedded.attention import spans
from longleaf.embedded.drafter import DraftAnchor, Drafter, _Context
from longleaf.embedded.recorder import Recorder
from longleaf.embedded.request import SpecStats

PAST = 512
"""Draft positions are shifted past so many tokens."""


def ignore_window() -> None:
    """Windowed layers run over the whole context."""

    def windowed(self: Drafter, anchor: DraftAnchor) -> _Context:
        block = self.config.block_size
        key = np.arange(anchor.prefix_len + block)
        hidden = key > anchor.prefix_len + np.arange(block)[:, None]
        return _Context(spans(anchor.prefix_slots), anchor.prefix_len, hidden)

    Drafter._windowed = windowed  # type: ignore[method-assign]


def shift_positions() -> None:
    """Draft K/V past a position are rotated as if they were elsewhere."""
    extend = Drafter.extend

    def shifted(self: Drafter, features: Any, positions: Any, slots: Any, pool: Any) -> None:
        extend(self, features, np.where(positions >= PAST, positions - 37, positions), slots, pool)

    Drafter.extend = shifted  # type: ignore[method-assign]


def drop_draft_kv() -> None:
    """Committed tokens leave no draft K/V."""
    Drafter.extend = lambda *_: None  # type: ignore[method-assign]


def commit_one() -> None:
    """The accept loop stops at the root."""

    def one(tree: Tree, tokens: Any) -> Accepted:
        return shorten(tree, accept_greedy(tree, tokens), 1)

    vars(step)["accept_greedy"] = one


def count_depth_wrong() -> None:
    """/metrics counts a depth that the path does not have: 3 beside a commit_len of 1."""
    record = Recorder.step

    def wrong(self: Recorder, result: Any, *rest: Any, **named: Any) -> None:
        record(self, result, *rest, **named)
        self._metrics.accepted_depth.labels("1k")._sum.inc(3)

    Recorder.step = wrong  # type: ignore[method-assign]


def count_nothing() -> None:
    """/metrics is there, and no step ever comes to it."""
    Recorder.step = lambda *_, **__: None  # type: ignore[method-assign]


def count_steps_twice() -> None:
    """Answers report each step twice, so half the commit_len."""
    add = SpecStats.add

    def twice(self: SpecStats, outcome: StepOutcome, drafted: int) -> None:
        add(self, outcome, drafted)
        self.steps += 1

    SpecStats.add = twice  # type: ignore[method-assign]


FAULTS: Mapping[str, Callable[[], None]] = {
    "none": lambda: None,
    "ignore_window": ignore_window,
    "shift_positions": shift_positions,
    "drop_draft_kv": drop_draft_kv,
    "commit_one": commit_one,
    "count_depth_wrong": count_depth_wrong,
    "count_nothing": count_nothing,
    "count_steps_twice": count_steps_twice,
}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
