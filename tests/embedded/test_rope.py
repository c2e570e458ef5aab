"""Rotary tables against formulas written another way."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from longleaf.embedded.config import DrafterConfig, YarnConfig
from longleaf.embedded.rope import frequencies, pair_halves, rotate, rotations, yarn_frequencies
from tests.embedded import naive
from tests.embedded.small_models import DRAFTER

KIMI = YarnConfig(
    factor=64.0,
    original_max_positions=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    attention_factor=1.0,
)


def test_yarn_equals_the_papers_formula() -> None:
    for dim, theta, yarn in (
        (128, 50000.0, KIMI),
        (64, 50000.0, replace(KIMI, factor=8.0)),
        (32, 10000.0, replace(KIMI, factor=4.0, original_max_positions=512, beta_fast=8.0)),
    ):
        scaling = {
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
        wanted, factor = naive.yarn({"rope_scaling": scaling, "head_dim": dim, "rope_theta": theta})
        ours, scale = yarn_frequencies(dim, theta, yarn)
        np.testing.assert_allclose(ours, wanted, rtol=1e-12)
        assert scale == pytest.approx(factor)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    plain = frequencies(128, 50000.0)
    ours, scale = yarn_frequencies(128, 50000.0, KIMI)
    turns = 4096 * plain / (2 * math.pi)
    assert (ours[turns > 40] == plain[turns > 40]).all()
    np.testing.assert_allclose(ours[turns < 0.7], plain[turns < 0.7] / 64)
    between = (turns < 28) & (turns > 1.2)
    assert between.sum() > 10
    assert (ours[between] < plain[between]).all()
    assert (ours[between] > plain[between] / 64).all()
    assert scale == pytest.approx(0.1 * math.log(64) + 1)


def test_the_attention_factor_scales_the_table() -> None:
    ours, scale = yarn_frequencies(128, 50000.0, replace(KIMI, attention_factor=0.5))
    assert scale == pytest.approx(0.5 * (0.1 * math.log(64) + 1))
    table = rotations(100, ours, scale)
    np.testing.assert_allclose(np.abs(table), scale, rtol=1e-6)
    np.testing.assert_allclose(np.angle(table[99, 0]), math.remainder(99.0, 2 * math.pi), rtol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_equals_cos_and_sin(interleaved: bool) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 3, 16)).astype(np.float32)
    positions = np.array([0, 1, 7, 100, 299])
    freqs = frequencies(16, 10000.0)
    order = np.arange(16) if interleaved else pair_halves(16)
    turned = np.ascontiguousarray(x[..., order])
    rotate(turned, rotations(300, freqs)[positions])
    for t, position in enumerate(positions):
        for head in range(3):
            angles = [float(position * f) for f in freqs]
            wanted = naive.rope(x[t, head].astype(np.float64), angles, 1.0, interleaved)
            np.testing.assert_allclose(turned[t, head], wanted[order], atol=2e-6)


def test_a_long_position_keeps_its_angle() -> None:
    """Angles are taken in float64: at 200k a float32 product would be off by 1e-2."""
    freqs = frequencies(64, 50000.0)
    at = 199_999
    wanted = [math.cos(math.fmod(at * float(f), 2 * math.pi)) for f in freqs]
    np.testing.assert_allclose(rotations(200_000, freqs)[at].real, wanted, atol=1e-6)


def test_the_small_drafters_config_reaches_the_table() -> None:
    config = DrafterConfig.parse(DRAFTER, "drafter")
    assert config.yarn is not None
    wanted, _ = naive.yarn(DRAFTER)
    ours, _ = yarn_frequencies(config.head_dim, config.rope_theta, config.yarn)
    np.testing.assert_allclose(ours, wanted, rtol=1e-12)
    other: dict[str, Any] = DRAFTER["rope_scaling"] | {"factor": 2.0}
    changed = DrafterConfig.parse(DRAFTER | {"rope_scaling": other}, "drafter")
    assert changed.yarn is not None
    assert changed.yarn.factor == 2.0
