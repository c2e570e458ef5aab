"""The DFlash drafter: K/V injection, windows, YaRN, and that it sees the committed prefix alone."""

from typing import Any

import numpy as np
import pytest

from longleaf.embedded.config import ConfigError, DrafterConfig, TargetConfig
from longleaf.embedded.drafter import DraftAnchor, Drafter
from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.target import Target
from longleaf.embedded.weights import F32, Weights
from tests.embedded import naive
from tests.embedded.small_models import DRAFTER, SmallPair, small_pair

CAPACITY, WINDOW = 120, 16
RNG = np.random.default_rng(5)
FEATURES: F32 = RNG.standard_normal((60, 48)).astype(np.float32)
SLOTS = RNG.permutation(CAPACITY)


def build(pair: SmallPair) -> Drafter:
    target = Target(TargetConfig.parse(pair.target_config, "t"), Weights(pair.target, "t"), (0, 2))
    config = DrafterConfig.parse(pair.drafter_config, "d")
    return Drafter(config, Weights(pair.drafter, "d"), target)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return build(small_pair())


def new_pool(drafter: Drafter) -> KvPool:
    return KvPool(TargetConfig.parse(small_pair().target_config, "t"), drafter.config, CAPACITY)


def extended(drafter: Drafter, context: int, slots: Any = SLOTS, shift: int = 0) -> KvPool:
    """A pool holding ``context`` committed tokens, at positions moved by ``shift``."""
    pool = new_pool(drafter)
    positions = np.arange(context) + shift
    drafter.extend(FEATURES[:context], positions, slots[:context], pool)
    return pool


def draft(drafter: Drafter, pool: KvPool, context: int, slots: Any = SLOTS, token: int = 9) -> F32:
    logits: F32 = drafter.draft([DraftAnchor(token, context, slots[:context])], pool).logits[0]
    return logits


@pytest.mark.parametrize("context", [0, 1, 10, WINDOW - 1, WINDOW, 45])
def test_equals_the_definition(drafter: Drafter, context: int) -> None:
    pair = small_pair()
    ours = draft(drafter, extended(drafter, context), context)
    features = FEATURES[:context].astype(np.float64)
    wanted = naive.draft(
        pair.target_config, pair.target, pair.drafter_config, pair.drafter, features, 9
    )
    assert ours.shape == (4, 61)
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=2e-5)


def test_without_yarn_positions_rotate_plainly() -> None:
    """Factor 1 leaves every frequency, and a factor over 1 does not."""
    plain = build(small_pair(draft_rope_scaling=None))
    unit = build(small_pair(draft_rope_scaling=DRAFTER["rope_scaling"] | {"factor": 1.0}))
    wide = build(small_pair())
    expected = draft(plain, extended(plain, 40), 40)
    np.testing.assert_allclose(draft(unit, extended(unit, 40), 40), expected, atol=1e-5)
    assert np.abs(draft(wide, extended(wide, 40), 40) - expected).max() > 0.01


def test_nothing_after_the_prefix_is_read(drafter: Drafter) -> None:
    context = 30
    expected = draft(drafter, extended(drafter, context), context)
    pool = new_pool(drafter)
    for rows in pool.arrays():
        rows.fill(np.nan)
    drafter.extend(FEATURES[:50], np.arange(50), SLOTS[:50], pool)
    pool.draft_keys[:, :, SLOTS[context:]] = np.nan
    pool.draft_values[:, :, SLOTS[context:]] = np.nan
    np.testing.assert_allclose(draft(drafter, pool, context), expected, atol=1e-5)


def test_drafting_leaves_the_pool_alone(drafter: Drafter) -> None:
    pool = extended(drafter, 30)
    before = [rows.copy() for rows in pool.arrays()]
    draft(drafter, pool, 30)
    for old, new in zip(before, pool.arrays(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("context", [0, 7, WINDOW - 1, WINDOW, 50])
def test_windowed_layers_read_their_window_only(drafter: Drafter, context: int) -> None:
    pool = extended(drafter, context)
    anchor = DraftAnchor(9, context, SLOTS[:context])
    clean = drafter.draft([anchor], pool)
    span = min(context, WINDOW - 1)
    assert clean.span_tokens.tolist() == [span]
    outside = SLOTS[: context - span]
    pool.draft_keys[:2][:, :, outside] = np.nan  # layers 0 and 1 are windowed, 2 is not
    pool.draft_values[:2][:, :, outside] = np.nan
    np.testing.assert_array_equal(drafter.draft([anchor], pool).logits, clean.logits)
    if span:
        pool.draft_keys[:2][:, :, SLOTS[context - span]] = np.nan
        assert np.isnan(drafter.draft([anchor], pool).logits).any()


def test_the_full_layer_reads_the_whole_context(drafter: Drafter) -> None:
    pool = extended(drafter, 50)
    before = draft(drafter, pool, 50)
    pool.draft_values[2][:, SLOTS[0]] += 3.0
    assert np.abs(draft(drafter, pool, 50) - before).max() > 1e-3


def test_the_window_matters_once_the_context_passes_it() -> None:
    narrow, wide = build(small_pair()), build(small_pair(draft_sliding_window=100))
    for context, same in ((WINDOW - 5, True), (40, False)):
        ours = draft(narrow, extended(narrow, context), context)
        theirs = draft(wide, extended(wide, context), context)
        assert bool(np.allclose(ours, theirs, atol=1e-5)) is same


def test_context_positions_matter(drafter: Drafter) -> None:
    straight = draft(drafter, extended(drafter, 30), 30)
    shifted = draft(drafter, extended(drafter, 30, shift=1), 30)
    assert np.abs(straight - shifted).max() > 0.01


def test_the_last_token_of_the_block_reaches_full_layers_only() -> None:
    """Windowed layers are causal inside the block, full layers are not."""
    causal = build(small_pair(draft_layer_types=["sliding_attention"] * 3))
    logits = [draft(causal, extended(causal, 20), 20, token=t) for t in (9, 10)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3  # all rows see the anchor
    pair = small_pair(draft_layer_types=["sliding_attention"] * 3, draft_block_size=3)
    shorter = draft(build(pair), extended(causal, 20), 20)
    np.testing.assert_allclose(shorter, logits[0][:2], atol=1e-5)  # later masks change nothing
    full = build(small_pair(draft_layer_types=["full_attention"] * 3))
    long = draft(full, extended(full, 20), 20)
    pair = small_pair(draft_layer_types=["full_attention"] * 3, draft_block_size=3)
    assert np.abs(draft(build(pair), extended(full, 20), 20) - long[:2]).max() > 1e-3


def test_anchors_of_one_batch_do_not_mix(drafter: Drafter) -> None:
    pool = extended(drafter, 50)
    other = SLOTS[60:90]
    drafter.extend(FEATURES[20:50], np.arange(30), other, pool)
    anchors = [
        DraftAnchor(9, 50, SLOTS[:50]),
        DraftAnchor(3, 7, other[:7]),
        DraftAnchor(4, 0, SLOTS[:0]),
    ]
    together = drafter.draft(anchors, pool)
    assert together.logits.shape == (3, 4, 61)
    assert together.span_tokens.tolist() == [WINDOW - 1, 7, 0]
    for i, anchor in enumerate(anchors):
        alone = drafter.draft([anchor], pool)
        np.testing.assert_allclose(together.logits[i], alone.logits[0], atol=1e-5)


def test_permuted_slots_change_nothing(drafter: Drafter) -> None:
    straight = np.arange(CAPACITY)
    ours = draft(drafter, extended(drafter, 50), 50)
    theirs = draft(drafter, extended(drafter, 50, straight), 50, straight)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_extending_by_parts_writes_the_same_rows_and_no_others(drafter: Drafter) -> None:
    whole, parts = extended(drafter, 40), new_pool(drafter)
    for at in (0, 1, 18, 40):
        stop = {0: 1, 1: 18, 18: 40, 40: 40}[at]
        drafter.extend(FEATURES[at:stop], np.arange(at, stop), SLOTS[at:stop], parts)
    np.testing.assert_allclose(parts.draft_keys, whole.draft_keys, atol=1e-5)
    np.testing.assert_allclose(parts.draft_values, whole.draft_values, atol=1e-5)
    others = SLOTS[40:]
    assert not whole.draft_keys[:, :, others].any()
    assert not whole.draft_values[:, :, others].any()
    assert not whole.latent.any()


def test_without_windowed_layers_the_span_is_zero() -> None:
    full = build(small_pair(draft_layer_types=["full_attention"] * 3))
    output = full.draft([DraftAnchor(9, 30, SLOTS[:30])], extended(full, 30))
    assert output.span_tokens.tolist() == [0]


def test_a_prefix_needs_a_slot_for_each_token() -> None:
    with pytest.raises(ValueError, match="prefix of 3 tokens needs as many slots, got 2"):
        DraftAnchor(9, 3, np.arange(2))


def test_a_drafter_must_fit_its_target() -> None:
    with pytest.raises(ConfigError, match="drafter: num_target_layers is 5, the target has 4"):
        build(small_pair(draft_num_target_layers=5))
