"""Compaction plans by hand; test_tree_properties holds them against the gather of the path."""

import numpy as np
import pytest

from longleaf.ddtree import compaction_plan


@pytest.mark.parametrize("length", [1, 2, 8])
def test_the_spine_moves_nothing(length: int) -> None:
    plan = compaction_plan(np.arange(length, dtype=np.int32))
    assert len(plan) == 0
    rows = np.arange(9.0)
    plan.apply(rows)
    assert rows.tolist() == list(range(9))


def test_only_rows_past_the_spine_move() -> None:
    plan = compaction_plan(np.array([0, 1, 4, 9], np.int32))
    assert plan.src.dtype == plan.dst.dtype == np.int32
    assert (plan.src.tolist(), plan.dst.tolist()) == ([4, 9], [2, 3])


def test_a_destination_that_is_an_earlier_source() -> None:
    plan = compaction_plan(np.array([0, 2, 3, 4], np.int32))
    assert (plan.src.tolist(), plan.dst.tolist()) == ([2, 3, 4], [1, 2, 3])
    rows = np.array([10, 11, 12, 13, 14])
    plan.apply(rows)
    assert rows.tolist() == [10, 12, 13, 14, 14]
    # Backwards the row of node 3 would be gone before it is read.
    backwards = np.array([10, 11, 12, 13, 14])
    for src, dst in zip(plan.src[::-1], plan.dst[::-1], strict=True):
        backwards[dst] = backwards[src]
    assert backwards.tolist() != rows.tolist()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([], "path must be .* start at the root"),
        ([1, 2], "path must be .* start at the root"),
        ([0, 2, 2], "path must ascend strictly"),
        ([0, 3, 1], "path must ascend strictly"),
    ],
)
def test_paths_that_are_none_are_refused(path: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compaction_plan(np.array(path, np.int32))
