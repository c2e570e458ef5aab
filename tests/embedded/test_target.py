"""The target's forward: one mechanism for prefill, decode and trees, over any slots."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from longleaf.embedded import attention
from longleaf.embedded.config import TargetConfig
from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.mla import absorbing_is_cheaper
from longleaf.embedded.target import Segment, Target
from longleaf.embedded.weights import Weights
from tests.embedded import naive
from tests.embedded.small_models import small_pair

TAPS = (0, 2)
CAPACITY = 160
I64 = npt.NDArray[np.int64]
RNG = np.random.default_rng(11)
TOKENS: I64 = RNG.integers(0, 61, 60)


def build(threads: int = 1, **changes: Any) -> Target:
    pair = small_pair(**changes)
    config = TargetConfig.parse(pair.target_config, "small")
    return Target(config, Weights(pair.target, "small"), TAPS, threads)


@pytest.fixture(scope="module")
def target() -> Target:
    return build()


@pytest.fixture(params=[True, False], ids=["expanded", "latent"])
def pool(request: pytest.FixtureRequest, target: Target) -> KvPool:
    return KvPool(target.config, None, CAPACITY, request.param)


def segment(tokens: I64, slots: I64, start: int = 0) -> Segment:
    """A plain continuation: rows ``start`` on of a sequence whose row i sits in slots[i]."""
    stop = start + len(tokens)
    return Segment(tokens, np.arange(start, stop), slots[start:stop], slots[:start])


def logits(target: Target, pool: KvPool, *segments: Segment) -> npt.NDArray[np.float32]:
    return target.logits(target.forward(segments, pool).hidden)


def random_tree(size: int, seed: int) -> tuple[I64, I64, npt.NDArray[np.bool_]]:
    """(parents, depths, visible) of a random tree whose node 0 is the root."""
    rng = np.random.default_rng(seed)
    parents, depths = np.full(size, -1), np.zeros(size, np.int64)
    visible = np.eye(size, dtype=bool)
    for node in range(1, size):
        parents[node] = rng.integers(0, node)
        depths[node] = depths[parents[node]] + 1
        visible[node] |= visible[parents[node]]
    return parents, depths, visible


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_interleave": False},
        {"tie_word_embeddings": True, "norm_topk_prob": False},
        {"first_k_dense_replace": 3, "n_shared_experts": 1, "num_experts_per_tok": 3},
    ],
    ids=["plain", "half-split rope", "tied, unnormalized experts", "one shared expert"],
)
def test_equals_the_definition(changes: dict[str, Any], expanded: bool) -> None:
    pair = small_pair(**changes)
    target = build(**changes)
    pool = KvPool(target.config, None, len(TOKENS), expanded)
    rows = np.arange(len(TOKENS))
    causal = rows[:, None] >= rows
    wanted, outputs = naive.target_forward(pair.target_config, pair.target, TOKENS, rows, causal)
    output = target.forward([segment(TOKENS, rows)], pool)
    np.testing.assert_allclose(target.logits(output.hidden), wanted, rtol=1e-4, atol=2e-5)
    tapped = np.concatenate([outputs[i] for i in TAPS], axis=1)
    np.testing.assert_allclose(output.features, tapped, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_chunked_prefill_equals_one_shot(target: Target, pool: KvPool, chunk: int) -> None:
    slots = np.arange(len(TOKENS)) + 5
    whole = logits(target, KvPool(target.config, None, CAPACITY), segment(TOKENS, slots))
    parts = [
        logits(target, pool, segment(TOKENS[at : at + chunk], slots, at))
        for at in range(0, len(TOKENS), chunk)
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 17, 40])
def test_a_tree_equals_each_of_its_paths(target: Target, pool: KvPool, size: int) -> None:
    prefix, nodes = TOKENS[:20], RNG.integers(0, 61, size)
    parents, depths, visible = random_tree(size, seed=size)
    slots = np.arange(CAPACITY)
    target.forward([segment(prefix, slots)], pool)
    tree = Segment(nodes, 20 + depths, slots[20 : 20 + size], slots[:20], visible)
    verified = logits(target, pool, tree)
    for node in range(size):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        sequence = np.concatenate((prefix, nodes[path]))
        plain = KvPool(target.config, None, len(sequence))
        alone = logits(target, plain, segment(sequence, slots[: len(sequence)]))
        np.testing.assert_allclose(verified[node], alone[-1], rtol=1e-4, atol=1e-5)


def test_row_count_changes_nothing(target: Target, pool: KvPool) -> None:
    """Greedy tokens must not depend on how many rows share a forward."""
    slots = np.arange(CAPACITY)
    target.forward([segment(TOKENS[:30], slots)], pool)
    together = logits(target, pool, segment(TOKENS[30:47], slots, 30))
    for row in range(17):
        alone = logits(target, pool, segment(TOKENS[30 + row : 31 + row], slots, 30 + row))
        np.testing.assert_allclose(alone[0], together[row], rtol=0, atol=1e-5)


def test_both_forms_over_latent_rows_are_used_and_agree(target: Target) -> None:
    few, many = 1, 40
    assert absorbing_is_cheaper(target.config, few, 60)
    assert not absorbing_is_cheaper(target.config, many, 60)
    slots = np.arange(CAPACITY)
    pool = KvPool(target.config, None, CAPACITY, expanded=False)
    target.forward([segment(TOKENS[:20], slots)], pool)
    projected = logits(target, pool, segment(TOKENS[20:], slots, 20))
    absorbed = logits(target, pool, segment(TOKENS[-1:], slots, len(TOKENS) - 1))
    np.testing.assert_allclose(absorbed[0], projected[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("scores", [16, 200, 2000])
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_of_queries_change_nothing(
    monkeypatch: pytest.MonkeyPatch, expanded: bool, scores: int, threads: int
) -> None:
    target = build(threads)
    slots = np.arange(CAPACITY)
    _, depths, visible = random_tree(40, seed=3)
    results = []
    monkeypatch.setattr(attention, "_MIN_ROWS", 3)
    for limit in (1 << 30, scores):
        monkeypatch.setattr(attention, "_BLOCK_SCORES", limit)
        pool = KvPool(target.config, None, CAPACITY, expanded)
        causal = logits(target, pool, segment(TOKENS, slots))
        tree = Segment(TOKENS[:40], 60 + depths, slots[60:100], slots[:60], visible)
        results.append(np.concatenate((causal, logits(target, pool, tree))))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_permuted_slots_change_nothing(target: Target, pool: KvPool) -> None:
    order = RNG.permutation(CAPACITY)
    contiguous = KvPool(target.config, None, CAPACITY)
    for at, count in ((0, 25), (25, 17), (42, 1), (43, 17)):
        part = TOKENS[at : at + count]
        scattered = logits(target, pool, segment(part, order, at))
        straight = logits(target, contiguous, segment(part, np.arange(CAPACITY), at))
        np.testing.assert_allclose(scattered, straight, rtol=1e-4, atol=1e-5)


def test_only_the_segments_slots_are_read_and_written(target: Target, pool: KvPool) -> None:
    slots = RNG.permutation(CAPACITY)[: len(TOKENS)]
    clean = logits(target, KvPool(target.config, None, CAPACITY), segment(TOKENS, slots))
    for rows in pool.arrays():
        rows.fill(np.nan)
    first = logits(target, pool, segment(TOKENS[:50], slots))
    second = logits(target, pool, segment(TOKENS[50:], slots, 50))
    np.testing.assert_allclose(np.concatenate((first, second)), clean, rtol=1e-4, atol=1e-5)
    others = np.setdiff1d(np.arange(CAPACITY), slots)
    for rows in pool.arrays():
        assert np.isnan(rows[..., others, :]).all()
        assert np.isfinite(rows[..., slots, :]).all()


def test_moved_rows_serve_at_their_new_slots(target: Target, pool: KvPool) -> None:
    slots = np.arange(CAPACITY)
    target.forward([segment(TOKENS[:30], slots)], pool)
    expected = logits(target, pool, segment(TOKENS[30:40], slots, 30))
    pool.move(slots[:30], slots[20:50])
    for rows in pool.arrays():
        rows[..., slots[:20], :] = np.nan
    moved = logits(target, pool, segment(TOKENS[30:40], slots[20:], 30))
    np.testing.assert_allclose(moved, expected, atol=1e-5)


def test_segments_of_one_forward_do_not_mix(target: Target, pool: KvPool) -> None:
    slots = RNG.permutation(CAPACITY)
    ours, theirs = slots[:60], slots[60:120]
    other = TOKENS[::-1].copy()
    target.forward([segment(TOKENS[:30], ours), segment(other[:9], theirs)], pool)
    _, depths, visible = random_tree(11, seed=5)
    tree = Segment(TOKENS[30:41], 30 + depths, ours[30:41], ours[:30], visible)
    mixed = [tree, segment(other[9:40], theirs, 9), segment(TOKENS[:1], slots[120:])]
    together = logits(target, pool, *mixed)
    alone = np.concatenate([logits(target, pool, one) for one in mixed])
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


def test_read_bytes_count_prefix_and_own_rows(target: Target, pool: KvPool) -> None:
    slots = np.arange(CAPACITY)
    output = target.forward([segment(TOKENS[:20], slots)], pool)
    row = 4 * (20 + 8) * 4  # layers, latent and rotary floats, bytes of a float
    assert output.kv_bytes_read == 20 * row
    pair = [segment(TOKENS[20:23], slots, 20), segment(TOKENS[:5], slots[100:])]
    assert target.forward(pair, pool).kv_bytes_read == (23 + 5) * row


def test_spans_cover_slots_in_order() -> None:
    slots = np.concatenate(
        (np.arange(300, 400), [7, 9, 8], np.arange(20, 40), np.arange(100, 200), [3])
    )
    found = attention.spans(slots)
    assert [(s.start, s.stop) for s in found] == [(0, 100), (100, 123), (123, 223), (223, 224)]
    assert [isinstance(s.index, slice) for s in found] == [True, False, True, False]
    everything = np.arange(500)
    assert (np.concatenate([everything[s.index] for s in found]) == slots).all()
    cut = [s.until(110) for s in found if s.start < 110]
    assert (np.concatenate([everything[s.index] for s in cut]) == slots[:110]).all()
    assert attention.spans(slots[:0]) == []
    assert isinstance(attention.spans(np.array([4, 5]))[0].index, slice)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"tokens": np.arange(0)}, "at least one row"),
        ({"positions": np.arange(2)}, "3 tokens needs as many positions and slots, got 2 and 3"),
        ({"slots": np.arange(4)}, "got 3 and 4"),
        ({"visible": np.ones((2, 2), bool)}, r"visible must be \[3, 3\], got \[2, 2\]"),
    ],
)
def test_malformed_segments_are_refused(fields: dict[str, Any], complaint: str) -> None:
    good: dict[str, Any] = {
        "tokens": np.arange(3),
        "positions": np.arange(3),
        "slots": np.arange(3),
        "prefix_slots": np.arange(0),
    }
    with pytest.raises(ValueError, match=complaint):
        Segment(**good | fields)


def test_positions_past_the_table_are_refused(target: Target, pool: KvPool) -> None:
    past = Segment(TOKENS[:1], np.array([512]), np.array([0]), np.arange(0))
    with pytest.raises(IndexError, match="512"):
        target.forward([past], pool)
