"""Sampling filters against a plain reference, and the inverse-CDF draw."""

from math import exp, inf, nan

import numpy as np
import pytest

from longleaf.ddtree import SamplingParams, draw, target_distribution

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, top_p=0.8),
    SamplingParams(top_k=5),
    SamplingParams(top_k=1000),
    SamplingParams(top_k=7, top_p=0.6),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.7, top_k=40, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=0.7, top_p=0.999),
    SamplingParams(top_p=0.01),
    SamplingParams(min_p=1.0),
]


def reference(logits: list[float], params: SamplingParams) -> list[float]:
    """Each filter in turn over a list of (token, probability), renormalised after each."""
    ranked = sorted(range(len(logits)), key=lambda t: (-logits[t], t))

    def renormalise(pairs: list[tuple[int, float]]) -> list[tuple[int, float]]:
        total = sum(p for _, p in pairs)
        return [(t, p / total) for t, p in pairs]

    peak = logits[ranked[0]]
    pairs = renormalise([(t, exp((logits[t] - peak) / params.temperature)) for t in ranked])
    if params.top_k != -1:
        pairs = renormalise(pairs[: params.top_k])
    nucleus, mass = [], 0.0
    for token, p in pairs:
        if params.top_p == 1.0 or mass < params.top_p:
            nucleus.append((token, p))
        mass += p
    pairs = renormalise(nucleus)
    pairs = renormalise([(t, p) for t, p in pairs if p >= params.min_p * pairs[0][1]])
    kept = dict(pairs)
    return [kept.get(t, 0.0) for t in range(len(logits))]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 9, 200, 1500])
def test_filters_against_the_reference(params: SamplingParams, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    for scale in (0.1, 1.0, 4.0):
        logits = (scale * rng.normal(size=vocabulary)).astype(np.float32)
        probs = target_distribution(logits, params)
        expected = reference([float(x) for x in logits], params)
        assert probs.dtype == np.float64
        assert probs == pytest.approx(expected, rel=1e-9, abs=1e-15)
        assert (probs > 0).tolist() == [p > 0 for p in expected]


def test_order_is_top_k_then_top_p_then_min_p() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Over top-k's survivors 4/7 + 3/7 the mass before the second is 0.57 >= 0.5. Over the whole
    # vocabulary it is 0.4, and top-p first would keep both.
    narrow = target_distribution(logits, SamplingParams(top_k=2, top_p=0.5))
    assert narrow == pytest.approx([1.0, 0.0, 0.0, 0.0])
    # top-p keeps 0.4 and 0.3 (0.4 < 0.5 before the second), and min-p both (0.75 >= 0.7). min-p
    # first would make them 4/7 and 3/7, of which top-p keeps one.
    last = target_distribution(logits, SamplingParams(top_p=0.5, min_p=0.7))
    assert last == pytest.approx([4 / 7, 3 / 7, 0.0, 0.0])


def test_temperature_comes_before_top_p() -> None:
    logits = np.log([0.6, 0.4])
    assert (target_distribution(logits, SamplingParams(top_p=0.55)) > 0).tolist() == [True, False]
    flat = target_distribution(logits, SamplingParams(temperature=100.0, top_p=0.55))
    assert (flat > 0).tolist() == [True, True]


def test_top_p_stops_once_the_mass_is_reached_exactly() -> None:
    probs = target_distribution(np.zeros(4), SamplingParams(top_p=0.5))
    assert probs.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_equal_logits_prefer_low_ids() -> None:
    logits = np.zeros(6, np.float32)
    assert target_distribution(logits, SamplingParams(top_k=2)).tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert (target_distribution(logits, SamplingParams(top_p=0.4)) > 0).sum() == 3


@pytest.mark.parametrize(
    "params",
    [SamplingParams(0.0), SamplingParams(9e-7, 0.5), SamplingParams(5.0, top_k=1)],
    ids=str,
)
def test_greedy_is_the_first_argmax(params: SamplingParams) -> None:
    assert params.greedy
    logits = np.array([1.0, 3.0, 3.0, -inf], np.float32)
    assert target_distribution(logits, params).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_cold_sampling_of_extreme_logits_stays_finite() -> None:
    logits = np.array([-3e38, 3e38, 2.9e38, -inf], np.float32)
    assert target_distribution(logits, SamplingParams(2e-6)).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_forbidden_tokens_get_nothing() -> None:
    logits = np.array([-inf, 0.0, -inf, 0.0])
    for params in (SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.99)):
        assert target_distribution(logits, params).tolist() == [0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("logits", [[nan, 1.0], [inf, 1.0], [-inf, -inf]])
def test_logits_without_a_finite_maximum_are_refused(logits: list[float]) -> None:
    for params in (SamplingParams(), SamplingParams(0.0)):
        with pytest.raises(ValueError, match="logits must have a finite maximum"):
            target_distribution(np.array(logits), params)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", -0.1, "at least 0, got -0.1"),
        ("temperature", nan, "finite and at least 0, got nan"),
        ("temperature", inf, "finite and at least 0, got inf"),
        ("top_p", 0.0, r"in \(0, 1\], got 0.0"),
        ("top_p", 1.5, r"in \(0, 1\], got 1.5"),
        ("top_p", nan, r"in \(0, 1\], got nan"),
        ("top_k", 0, "at least 1, got 0"),
        ("top_k", -2, "at least 1, got -2"),
        ("min_p", -0.5, r"in \[0, 1\], got -0.5"),
        ("min_p", 1.1, r"in \[0, 1\], got 1.1"),
    ],
)
def test_parameters_outside_their_limits_are_refused(field: str, value: float, limit: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*{limit}"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_draw_is_the_inverse_cdf() -> None:
    probs = np.array([0.25, 0.0, 0.5, 0.25])
    cases = {0.0: 0, 0.2499: 0, 0.25: 2, 0.7499: 2, 0.75: 3, 0.9999: 3}
    assert {u: draw(probs, u) for u in cases} == cases
    # A sum that is not 1 scales.
    assert {u: draw(8.0 * probs, u) for u in cases} == cases


def test_draw_never_gives_a_token_of_probability_zero() -> None:
    probs = np.array([0.0, 0.1, 0.0, 0.2, 0.7, 0.0, 0.0])
    for u in (0.0, 5e-324, np.nextafter(1.0, 0.0), 1.0):
        assert probs[draw(probs, float(u))] > 0
    assert draw(probs, 0.0) == 1
    assert draw(probs, 1.0) == 4
    # Masses whose running sum rounds: u * total lands on the total.
    rng = np.random.default_rng(0)
    for _ in range(300):
        tail = rng.random(50) ** 8
        tail[40:] = 0.0
        tail[rng.integers(0, 50, 20)] = 0.0
        assert tail[draw(tail, float(np.nextafter(1.0, 0.0)))] > 0
        assert tail[draw(tail, 1.0)] > 0
        assert tail[draw(tail, 0.0)] > 0
    # Mass too small to move the running sum is out of reach of the clamp too.
    assert draw(np.array([1.0, 1e-300, 0.0]), 1.0) == 0


@pytest.mark.parametrize("u", [-0.1, 1.0001, nan])
def test_draw_refuses_u_outside_the_unit_interval(u: float) -> None:
    with pytest.raises(ValueError, match=r"u must be in \[0, 1\]"):
        draw(np.array([1.0]), u)


@pytest.mark.parametrize("probs", [[0.0, 0.0], [nan, 1.0], [inf]])
def test_draw_refuses_what_is_no_distribution(probs: list[float]) -> None:
    with pytest.raises(ValueError, match="probs must have a positive finite sum"):
        draw(np.array(probs), 0.5)
