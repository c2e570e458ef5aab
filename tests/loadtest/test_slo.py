"""What meets an objective, and what was never measured."""

from typing import Any

import pytest

from longleaf_load.slo import Slo
from tests.loadtest.serving import DONE, asked, blank, event, head

ALL = Slo(ttft_ms=500, tpot_ms=20, gap_p99_ms=50)


def served(**values: Any) -> Any:
    fields = {"ttft": 0.5, "tpot": 0.02, "gap_p99": 0.05, "completion_tokens": 9, "events": 3}
    return blank(outcome="ok", **{**fields, **values})


def test_bounds_are_in_milliseconds_and_inclusive() -> None:
    assert ALL.met_by(served())
    assert not ALL.met_by(served(ttft=0.501))
    assert not ALL.met_by(served(tpot=0.0201))
    assert not ALL.met_by(served(gap_p99=0.051))
    longer = Slo(ttft_ms=300, ttft_ms_per_1k=2000)
    assert longer.met_by(served(prompt_tokens=100))
    assert not longer.met_by(served(prompt_tokens=99))


@pytest.mark.parametrize("figure", ["ttft", "tpot", "gap_p99"])
def test_what_was_not_measured_is_not_met(figure: str) -> None:
    record = served(**{figure: None, "completion_tokens": None})
    assert not ALL.met_by(record)
    assert ALL.unmeasured(record) == [f"{figure}_ms"]
    assert Slo().met_by(record)
    assert Slo().unmeasured(record) == []


def test_a_server_that_tells_no_usage_meets_no_bound_on_the_time_per_token() -> None:
    record = asked([(0.0, head() + event("a")), (0.0, event("b") + DONE)])
    assert record.outcome == "ok"
    assert not Slo(tpot_ms=60_000).met_by(record)
    assert Slo(tpot_ms=60_000).unmeasured(record) == ["tpot_ms"]
    assert Slo(ttft_ms=60_000, gap_p99_ms=60_000).met_by(record)


def test_what_cannot_be_has_no_bound() -> None:
    one = served(tpot=None, gap_p99=None, completion_tokens=1, events=1)
    assert ALL.met_by(one)
    assert ALL.unmeasured(one) == []
    at_once = served(gap_p99=None, completion_tokens=5, events=1, tpot=0.0)
    assert ALL.met_by(at_once)


def test_only_what_was_served_is_measured() -> None:
    for outcome in ("refused", "failed", "cancelled"):
        record = blank(outcome=outcome)
        assert not ALL.met_by(record)
        assert ALL.unmeasured(record) == []
