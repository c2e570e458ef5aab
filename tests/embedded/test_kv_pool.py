"""Moving rows between slots, and what a pool holds."""

import numpy as np
import pytest

from longleaf.embedded.config import DrafterConfig, TargetConfig
from longleaf.embedded.kv_pool import KvPool
from tests.embedded.small_models import DRAFTER, TARGET

TARGET_CONFIG = TargetConfig.parse(TARGET, "target")
DRAFTER_CONFIG = DrafterConfig.parse(DRAFTER, "drafter")


def filled(expanded: bool = True) -> KvPool:
    pool = KvPool(TARGET_CONFIG, DRAFTER_CONFIG, 12, expanded)
    for i, rows in enumerate(pool.arrays()):
        rows[:] = np.random.default_rng(i).standard_normal(rows.shape)
    return pool


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([4, 5, 6, 7], [3, 4, 5, 6]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([2, 9, 3], [3, 2, 9]),
        ([5], [5]),
        ([], []),
    ],
    ids=["down by one", "up by one", "a cycle", "in place", "nothing"],
)
def test_move_reads_every_row_before_it_writes(
    src: list[int], dst: list[int], expanded: bool
) -> None:
    pool = filled(expanded)
    before = [rows.copy() for rows in pool.arrays()]
    pool.move(np.array(src, np.int32), np.array(dst, np.int32))
    kept = [slot for slot in range(12) if slot not in dst]
    for old, new in zip(before, pool.arrays(), strict=True):
        for a, b in zip(src, dst, strict=True):
            np.testing.assert_array_equal(new[..., b, :], old[..., a, :])
        np.testing.assert_array_equal(new[..., kept, :], old[..., kept, :])


def test_move_needs_pairs() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        filled().move(np.array([1, 2]), np.array([3]))


def test_a_slot_holds_one_latent_row_a_layer() -> None:
    pool = KvPool(TARGET_CONFIG, DRAFTER_CONFIG, 12, expanded=False)
    assert pool.latent.shape == (4, 12, 20 + 8)
    assert pool.draft_keys.shape == pool.draft_values.shape == (3, 2, 12, 12)
    assert len(pool.arrays()) == 3
    assert len(filled().arrays()) == 6
    assert all(rows.dtype == np.float32 for rows in filled().arrays())


def test_a_pool_without_drafter_keeps_no_draft_rows() -> None:
    pool = KvPool(TARGET_CONFIG, None, 12)
    assert pool.draft_keys.size == pool.draft_values.size == 0
    pool.move(np.array([1, 2]), np.array([2, 3]))


def test_a_pool_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        KvPool(TARGET_CONFIG, None, 0)
