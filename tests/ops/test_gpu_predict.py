"""The arithmetic behind what is predicted for 8 x RTX PRO 6000."""

import pytest

from ops.gpu import predict
from ops.gpu.predict import BEST, calibration_at, measured_values, step, worst_case


def test_experts_are_counted_once_however_many_nodes_choose_them() -> None:
    assert predict.distinct_experts(1) == pytest.approx(8.0)
    assert predict.distinct_experts(2) == pytest.approx(16 - 8 * 8 / 384)
    assert predict.distinct_experts(10_000) == pytest.approx(384.0)


def test_weights_of_a_rank() -> None:
    # A sparse layer of attention, shared expert and gate, by hand, in millions of weights.
    attention = 7.168 * 2.112 + (1.536 * 12.288 + 0.512 * 16.384 + 8.192 * 7.168) / 8
    sparse = 3 * 7.168 * 2.048 / 8 + 7.168 * 0.384
    dense = 3 * 7.168 * 18.432 / 8
    head = 7.168 * 163.84 / 8
    expected = 2e6 * (61 * attention + 60 * sparse + dense + head)
    assert predict.weight_bytes() == pytest.approx(expected, rel=1e-9)
    assert predict.expert_bytes(8) == pytest.approx(60 * 8 * 3 * 7168 * 2048 * 0.5625 / 8)


def test_an_all_reduce_is_a_latency_and_two_phases_of_traffic() -> None:
    assert predict.all_reduce_seconds(0, 3, 1e-5) == pytest.approx(3e-5)
    traffic = 2 * 7 / 8 * 9 * 7168 * 2 / 50e9
    assert predict.all_reduce_seconds(9, 1, 0.0) == pytest.approx(traffic)


def test_the_worst_case_gives_peers_plain_decoding() -> None:
    values = measured_values()
    worst = worst_case(calibration_at(0, values))
    start = step(0, 1, worst, calibration_at(0, values))
    assert 1e3 / (start.total - start.attention) == pytest.approx(91.5)
    # Not fitted: what they publish at 128k.
    far = step(131_072, 1, worst, calibration_at(131_072, values))
    assert 1e3 / far.total == pytest.approx(56.7, rel=0.05)
    assert far.draft == 0.0


def test_steps_grow_with_context_and_best_is_below_worst() -> None:
    values = measured_values()
    worst = worst_case(calibration_at(0, values))
    totals = []
    for context in predict.CONTEXTS:
        low, high = (
            step(context, 9, case, calibration_at(context, values)) for case in (BEST, worst)
        )
        for part in ("weights", "experts", "attention", "all_reduce", "draft", "other", "total"):
            assert 0.0 < getattr(low, part) <= getattr(high, part)
        totals.append(low.total)
    assert totals == sorted(totals)


def test_the_table_has_a_row_a_context_and_the_readme_says_predicted() -> None:
    lines = predict.table(9, measured_values()).splitlines()
    assert len(lines) == 2 + len(predict.CONTEXTS)
    assert {line.count("|") for line in lines} == {12}
    between = predict.README.read_text().partition(predict.BEGIN)[2].partition(predict.END)[0]
    assert between.strip().splitlines()[:2] == lines[:2]
    assert lines[0].startswith("| predicted")
