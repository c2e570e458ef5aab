"""Uniforms belong to positions; log-probabilities are the model's own."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from scipy.stats import kstest

from longleaf.embedded.sampling import position_uniforms, token_logprobs


@given(
    seed=st.integers(-(2**63), 2**64),
    position=st.integers(0, 200_000),
    count=st.integers(1, 9),
)
def test_a_position_has_one_uniform(seed: int, position: int, count: int) -> None:
    together = position_uniforms(seed, position, count)
    alone = [position_uniforms(seed, position + i, 1)[0] for i in range(count)]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()


def test_seeds_and_positions_differ() -> None:
    draws = np.concatenate([position_uniforms(seed, 0, 2000) for seed in range(5)])
    assert len(np.unique(draws)) == len(draws)
    assert kstest(draws, "uniform").pvalue > 0.001


def test_logprobs_are_log_softmax_with_the_best_alternatives() -> None:
    logits = np.random.default_rng(0).normal(0, 4, (3, 50)).astype(np.float32)
    logits[1, [7, 9]] = 30.0
    expected = log_softmax(logits.astype(np.float64), axis=1)
    entries = token_logprobs(logits, [4, 9, 0], 3)
    for row, entry in enumerate(entries):
        np.testing.assert_allclose(entry.logprob, expected[row, entry.token], rtol=1e-12)
        assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
        assert [p for _, p in entry.top] == np.sort(expected[row])[::-1][:3].tolist()
    assert [token for token, _ in entries[1].top][:2] == [7, 9]
    assert token_logprobs(logits, [1, 1, 1], 0)[0].top == ()
