"""Figures of a report, by hand."""

from typing import Any

import pytest

from longleaf_load.arrivals import Phase
from longleaf_load.records import Record
from longleaf_load.report import compare_lines, compare_page, headline, page, simulated_note
from longleaf_load.slo import Slo
from longleaf_load.summary import summarize
from tests.loadtest.serving import blank

PHASES = [Phase("1x", 10.0, 1.0, 1.0), Phase("2x", 20.0, 2.0, 2.0)]


def ok(number: int = 0, **values: Any) -> Record:
    fields = {"outcome": "ok", "ttft": 1.0, "seconds": 2.0, "completion_tokens": 10, "events": 5}
    return blank(arrival=number, sent=float(number), **{**fields, **values})


def report(records: list[Record], slo: Slo | None = None, **about: Any) -> dict[str, Any]:
    return summarize(records, PHASES, slo or Slo(), {"plan": "p", **about})


def test_commit_len_is_tokens_by_steps_not_by_requests() -> None:
    records = [
        ok(commit_len=9.0, steps=1),
        ok(commit_len=2.0, steps=10, text="prose", prompt_tokens=3000, phase=1),
        ok(commit_len=3.0, steps=4, phase=1),
        ok(),
    ]
    found = report(records)
    assert found["contexts"]["1k"]["commit_len"] == pytest.approx((9 + 12) / 5)
    assert found["contexts"]["4k"]["commit_len"] == 2.0
    assert found["texts"]["code"]["commit_len"] == pytest.approx((9 + 12) / 5)
    assert found["phases"][1]["commit_len"] == pytest.approx((20 + 12) / 14)
    assert report([ok()])["contexts"]["1k"]["commit_len"] is None


def test_times_are_milliseconds_of_what_was_served() -> None:
    records = [
        ok(ttft=0.1 * n, tpot=0.01 * n, gap_p99=0.02 * n, queue_seconds=0.5 * n,
           prefill_seconds=0.25 * n)
        for n in (1, 2, 3, 4, 5)
    ]  # fmt: skip
    records.append(blank(outcome="failed", ttft=99.0, reason="timeout"))
    group = report(records)["contexts"]["1k"]
    middle = {"ttft_ms": 300, "tpot_ms": 30, "gap_p99_ms": 60, "queue_ms": 1500, "prefill_ms": 750}
    for name, value in middle.items():
        assert group[name]["p50"] == pytest.approx(value)
        assert group[name]["mean"] == pytest.approx(value)
        assert group[name]["p95"] == pytest.approx(value / 3 * (4 + 0.8))
        assert group[name]["p99"] == pytest.approx(value / 3 * (4 + 0.96))


def test_how_late_requests_were_sent() -> None:
    records = [ok(n, late=0.001 * n) for n in range(101)]
    assert report(records)["late_p99_seconds"] == pytest.approx(0.099)


def test_a_run_that_was_stopped_has_rates_of_the_time_that_it_had() -> None:
    records = [ok(n) for n in range(8)] + [ok(n, phase=1) for n in range(8, 11)]
    first, second = report(records, ran_seconds=12.0, stopped_after_seconds=12.0)["phases"]
    assert (first["seconds"], first["planned_seconds"]) == (10.0, 10.0)
    assert (second["seconds"], second["planned_seconds"]) == (2.0, 20.0)
    assert first["offered_per_second"] == pytest.approx(0.8)
    assert second["offered_per_second"] == pytest.approx(1.5)
    assert second["offered_tokens_per_second"] == pytest.approx(150)
    assert second["goodput_per_second"] == pytest.approx(1.5)
    assert second["goodput_prompt_tokens_per_second"] == pytest.approx(150)
    assert second["goodput_completion_tokens_per_second"] == pytest.approx(15)
    never = report(records[:8], stopped_after_seconds=9.0, ran_seconds=9.0)
    assert [one["seconds"] for one in never["phases"]] == [9.0, 0.0]
    assert never["phases"][1]["offered_per_second"] == 0.0
    assert "requests that were under way then are in no figure" in page(never)
    assert "under way" not in page(report(records))


def test_what_is_offered_are_arrivals() -> None:
    records = [ok(0), ok(0, turn=2), ok(0, turn=3), ok(1, attempt=2),
               blank(arrival=1, outcome="refused", status=429, reason="full")]  # fmt: skip
    phase = report(records)["phases"][0]
    assert phase["offered_per_second"] == pytest.approx(0.2)
    assert phase["offered_tokens_per_second"] == pytest.approx(20)
    assert phase["later_turns_per_second"] == pytest.approx(0.2)
    assert phase["goodput_per_second"] == pytest.approx(0.4)
    assert phase["requests"] == 5
    diagonal = "stroke-dasharray"
    assert diagonal not in page(report(records))
    assert diagonal in page(report([ok(0)]))


def test_a_promise_is_held_against_what_came_in_a_later_phase() -> None:
    refused = {"outcome": "refused", "status": 429, "reason": "full", "seconds": 0.0}
    records = [
        blank(sent=9.0, retry_after=4.0, **refused),
        ok(11, phase=1, ttft=3.0, prefill_seconds=1.0),  # it started at 13
        blank(sent=12.0, phase=1, retry_after=5.0, **refused),
        ok(20, phase=1, ttft=3.0, prefill_seconds=1.0),  # at 22
    ]
    found = report(records)
    first, second = (one["retry_after"] for one in found["phases"])
    assert (first["refusals"], first["checked"], first["median_error"]) == (1, 1, 0.0)
    assert (second["refusals"], second["checked"], second["median_error"]) == (1, 1, 0.5)
    assert (first["true_seconds"]["p50"], second["true_seconds"]["p50"]) == (4.0, 10.0)
    assert found["retry_after"]["checked"] == 2


def test_an_objective_that_was_not_measured_is_missed_and_told() -> None:
    found = report([ok(0), ok(1, tpot=0.001), ok(2)], Slo(tpot_ms=50))
    assert found["slo"]["met"] == pytest.approx(1 / 3)
    assert found["slo"]["unmeasured"] == {"tpot_ms": 2}
    told = "tpot_ms could not be measured of 2 answers: they count as missed."
    assert told in found["cautions"]
    assert told in page(found)


@pytest.mark.parametrize(
    ("late", "ttft", "told"),
    [(0.2, 60.0, True), (0.05, 60.0, False), (0.05, 0.4, True), (0.05, 0.6, False)],
)
def test_requests_that_were_sent_late_are_told(late: float, ttft: float, told: bool) -> None:
    found = report([ok(late=late, ttft=ttft)])
    assert any("sent late" in one for one in found["cautions"]) is told
    assert ("sent late, one in a hundred by more than" in page(found)) is told


def test_a_simulation_that_fell_behind_is_told() -> None:
    labelled = [ok(fingerprint="simulated:c:x2")]

    def cautions(**about: Any) -> str:
        return " ".join(report(labelled, **about)["cautions"])

    assert "fell behind its curve by 2.5 s" in cautions(simulation_lost_seconds=2.5)
    assert cautions(simulation_lost_seconds=0.0) == ""
    assert "kept up with their curve is not known" in cautions()
    assert report([ok(fingerprint="fp_1")])["cautions"] == []


def test_prompts_that_were_counted_otherwise_are_told() -> None:
    found = report([ok(counted_tokens=100), ok(counted_tokens=99)])
    assert any("in 1 of 2 prompts" in one for one in found["cautions"])


def test_only_simulated_engines_are_simulated() -> None:
    found = report([ok(fingerprint="fp_1"), ok(fingerprint="simulated:c:x2"), ok()])
    assert found["simulated"] == ["simulated:c:x2"]
    assert found["fingerprints"] == ["fp_1", "simulated:c:x2"]
    real = report([ok(fingerprint="fp_1")])
    assert real["simulated"] == []
    texts = (headline(real), page(real), simulated_note(real), *compare_lines(real, real))
    assert not any("simulated" in text.lower() for text in texts)


def test_a_simulated_run_says_so_wherever_it_is_shown() -> None:
    refused = [blank(outcome="refused", status=429, reason="full")]
    for found in (
        report([ok(fingerprint="simulated:c:x2")]),
        report(refused, simulated=["simulated:c:x2"]),
    ):
        assert headline(found).startswith("SIMULATED (simulated:c:x2). ")
        assert "locust_*.csv" in simulated_note(found)
        assert "<b>simulated</b> (simulated:c:x2)" in page(found)
        real = report([ok()])
        assert "A: SIMULATED" in compare_lines(found, real)[0]
        assert "<b>simulated</b> (simulated:c:x2)" in compare_page(real, found)
