"""The step model finds the law that made the steps, and says how well it does."""

import random
from dataclasses import replace

import pytest

from longleaf.gateway.replicas.loads import (
    DecodeMoments,
    LoadReport,
    StepTotals,
    parse_loads,
    parse_step_totals,
    restarted,
)
from longleaf.gateway.replicas.step_model import StepModel

A, B, C = 0.006, 7.6e-6, 0.0009
"""Seconds; seconds a token of context (1.4 s at 185k); seconds a sequence."""


def law(context: float, batch: float) -> float:
    return A + B * context + C * batch


def test_it_finds_the_law() -> None:
    model, random_ = StepModel(), random.Random(5)
    assert model.step_seconds(1, 1) is None
    for _ in range(300):
        batch = random_.randint(1, 8)
        context = sum(random_.choice([1_000, 16_000, 64_000]) for _ in range(batch))
        model.observe(context, batch, law(context, batch))
    a, b, c = model.coefficients
    assert (a, b, c) == pytest.approx((A, B, C), rel=0.02)
    assert model.step_seconds(185_000, 1) == pytest.approx(law(185_000, 1), rel=0.01)
    assert model.residual is not None
    assert model.residual < 0.01


def test_noise_shows_in_the_residual() -> None:
    model, random_ = StepModel(), random.Random(7)
    for _ in range(500):
        batch, context = random_.randint(1, 8), random_.uniform(1_000, 200_000)
        noise = random_.choice([0.8, 1.2])
        model.observe(context, batch, noise * law(context, batch))
    assert model.residual == pytest.approx(0.2, abs=0.06)
    assert model.step_seconds(100_000, 4) == pytest.approx(law(100_000, 4), rel=0.1)


def test_it_follows_a_replica_that_changes() -> None:
    model, random_ = StepModel(), random.Random(9)
    for slower in (1.0, 3.0):
        for _ in range(2_000):
            batch, context = random_.randint(1, 8), random_.uniform(1_000, 200_000)
            model.observe(context, batch, slower * law(context, batch))
    assert model.step_seconds(50_000, 2) == pytest.approx(3 * law(50_000, 2), rel=0.02)


def test_one_point_alone_is_predicted_and_stays_finite() -> None:
    model = StepModel()
    for _ in range(20_000):
        model.observe(10_000, 1, 0.05)
    assert model.step_seconds(10_000, 1) == pytest.approx(0.05, rel=1e-3)
    assert all(abs(value) < 1 for value in model.coefficients)


def report(moments: DecodeMoments | None, used: int, prefilled: int = 0) -> LoadReport:
    return LoadReport(1, 0, used, 10**6, 8, None, prefilled, prefilled / 800, moments)


def steps(counts: dict[int, int], each: float, commit_len: float) -> DecodeMoments:
    """Moments of ``counts[batch]`` steps at ``each`` tokens of context a sequence."""
    rows = [(batch, law(each * batch, batch)) for batch, n in counts.items() for _ in range(n)]
    return DecodeMoments(
        len(rows),
        sum(batch for batch, _ in rows),
        sum(seconds for _, seconds in rows),
        sum(batch * batch for batch, _ in rows),
        sum(batch * seconds for batch, seconds in rows),
        commit_len * sum(batch for batch, _ in rows),
    )


def test_windows_between_reports_are_learnt_from() -> None:
    model, random_ = StepModel(), random.Random(3)
    total = DecodeMoments(0, 0, 0, 0, 0, 0)
    last = report(steps({1: 1}, 1_000, 1), 1_000)
    for _ in range(200):
        each = random_.choice([1_000, 8_000, 32_000])
        counts = {random_.randint(1, 4): 30, random_.randint(5, 8): 30}
        window = steps(counts, each, 3.5)
        total = DecodeMoments(*map(sum, zip(_tuple(total), _tuple(window), strict=True)))
        context = int(each * window.batch / window.steps)
        earlier, last = replace(last, used_tokens=context), report(total, context)
        model.learn(earlier, last)
    assert model.commit_len == pytest.approx(3.5, rel=0.01)
    assert model.step_seconds(64_000, 2) == pytest.approx(law(64_000, 2), rel=0.05)
    assert model.token_seconds(64_000, 2) == pytest.approx(law(64_000, 2) / 3.5, rel=0.05)


def test_an_engine_that_restarted_teaches_nothing() -> None:
    model = StepModel()
    model.learn(report(steps({2: 50}, 1_000, 2), 1, 9_000), report(steps({2: 5}, 1_000, 2), 1, 10))
    assert (model.observations, model.prefill_rate, model.commit_len) == (0, None, None)
    model.learn(report(None, 1), report(None, 1, 8_000))
    assert model.prefill_rate == 800
    assert model.prefill_seconds(4_000) == 5.0


def test_cached_prompts_do_not_slow_the_forecast_of_others() -> None:
    model = StepModel()

    def prefill(tokens: int, seconds: float) -> None:
        after = replace(report(None, 1), prefilled_tokens=tokens, prefill_seconds=seconds)
        model.learn(report(None, 1), after)

    prefill(20, 0.016)  # all but 20 tokens lay in the cache: 1,250 tokens a second
    assert model.prefill_seconds(1_000) == pytest.approx(0.8)
    prefill(8_192, 1.024)
    assert model.prefill_rate == pytest.approx(8_000)
    for _ in range(50):
        prefill(20, 0.013)
    assert model.prefill_rate == pytest.approx(8_000)
    assert model.prefill_seconds(32_000) == pytest.approx(4.0)
    assert model.prefill_seconds(20) == pytest.approx(0.013)  # none was ever faster
    prefill(4_096, 1.024)  # long contexts are slower: this counts
    assert model.prefill_rate == pytest.approx((0.9 * 8_192 + 4_096) / (0.9 * 1.024 + 1.024))


def test_restarts_are_seen() -> None:
    before = report(steps({2: 50}, 1_000, 2), 1, 9_000)
    assert not restarted(before, report(steps({2: 51}, 1_000, 2), 1, 9_000))
    assert restarted(before, report(steps({2: 51}, 1_000, 2), 1, 8_999))
    assert restarted(before, report(steps({2: 49}, 1_000, 2), 1, 9_000))
    assert restarted(before, report(None, 1, 9_000))
    assert restarted(before, replace(before, capacity_tokens=5))


def _tuple(moments: DecodeMoments) -> tuple[float, ...]:
    return (
        *(moments.steps, moments.batch, moments.seconds),
        *(moments.batch_squared, moments.batch_seconds, moments.tokens),
    )


CAPTURED = {
    "num_running_reqs": 4,
    "num_waiting_reqs": 2,
    "num_used_tokens": 1338,
    "max_total_num_tokens": 4096,
    "max_running_requests": 4,
    "total_prefill_uncached_tokens": 84,
    "total_prefill_busy_us": 2173981,
    "decode_moments": [4627.0, 5591.0, 8829714.0, 9413.0, 10233639.0, 5591.0],
    "memory": {"kv_cache_gb": 0.018},
}


def test_a_captured_report_is_read() -> None:
    read = parse_loads({"loads": [CAPTURED]})
    assert (read.running, read.waiting, read.used_tokens, read.capacity_tokens) == (
        *(4, 2, 1338, 4096),
    )
    assert (read.max_running, read.prefilled_tokens) == (4, 84)
    assert read.prefill_seconds == pytest.approx(2.173981)
    assert read.bytes_per_token == pytest.approx(0.018 * 2**30 / 4096)
    assert read.decode is not None
    assert read.decode.seconds / read.decode.steps == pytest.approx(1.9083e-3, rel=1e-4)
    two = parse_loads({"loads": [CAPTURED, CAPTURED]})
    assert (two.running, two.capacity_tokens) == (8, 8192)
    idle = parse_loads({"loads": [{**CAPTURED, "decode_moments": None, "memory": None}]})
    assert (idle.decode, idle.bytes_per_token) == (None, None)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"loads": []},
        {"loads": [5]},
        {"loads": [{"decode_moments": [1]}]},
        {"loads": [{"decode_moments": [True] * 6}]},
        {"loads": [{"decode_moments": [float("nan")] * 6}]},
        {"loads": [{"decode_moments": [1, 1, 1, 1, float("inf"), 1]}]},
        {"loads": [{"num_used_tokens": 1e300}]},
        {"loads": [{"num_used_tokens": 10**400}]},
        {"loads": [{"max_total_num_tokens": float("inf")}]},
        {"loads": [{"memory": {"kv_cache_gb": float("nan")}}]},
    ],
)
def test_reports_that_make_no_sense(answer: object) -> None:
    with pytest.raises(ValueError, match=r"loads|decode_moments"):
        parse_loads(answer)


METRICS = """\
# TYPE longleaf_step_seconds histogram
longleaf_step_seconds_bucket{context_bucket="1k",le="0.1",phase="total"} 30.0
longleaf_step_seconds_count{context_bucket="1k",phase="total"} 30.0
longleaf_step_seconds_sum{context_bucket="1k",phase="total"} 0.6
longleaf_step_seconds_count{context_bucket="4k",phase="total"} 10.0
longleaf_step_seconds_sum{context_bucket="4k",phase="total"} 0.4
longleaf_step_seconds_sum{context_bucket="4k",phase="draft"} 9.0
longleaf_commit_len_count{context_bucket="1k"} 30.0
longleaf_commit_len_sum{context_bucket="1k"} 100.0
longleaf_commit_len_sum{context_bucket="4k"} 20.0
other_step_seconds_sum{phase="total"} 5
"""


def test_engines_without_moments_are_learnt_from_by_their_metrics() -> None:
    totals = parse_step_totals(METRICS)
    assert totals == StepTotals(40.0, 1.0, 120.0)
    odd = METRICS + 'longleaf_step_seconds_sum{phase="total"} NaN\nlongleaf_commit_len_sum +Inf\n'
    assert parse_step_totals(odd) == totals
    assert parse_step_totals("sglang:num_running_reqs 1\n") is None
    model = StepModel()
    before = replace(report(None, 3_000), running=2, step_totals=StepTotals(10.0, 0.4, 60.0))
    model.learn(before, replace(before, step_totals=totals))
    assert model.commit_len == 2.0
    assert model.step_seconds(3_000, 2) == pytest.approx(0.02, rel=1e-3)
    model.learn(before, replace(before, step_totals=None))
    assert model.observations == 1
