"""What is recorded of answers that are known to the byte and the moment."""

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from longleaf.gateway.admission.admission import SaturatedError
from longleaf.gateway.api.refusals import refusal
from longleaf_load.stream import note_times
from tests.loadtest.serving import DONE, Piece, asked, blank, event, head

LONG = 20.0
"""Seconds after which a server gives up that should have been given up before."""
USAGE = {"prompt_tokens": 7, "completion_tokens": 5}
TOLD = {
    "replica": "http://a:1",
    "queue_seconds": 0.25,
    "prefill_seconds": 0.125,
    "commit_len": 2.5,
    "steps": 2,
}


def chunk(**fields: object) -> bytes:
    return b"data: " + json.dumps({"choices": [], **fields}).encode() + b"\n\n"


END = chunk(usage=USAGE, system_fingerprint="fp") + chunk(longleaf=TOLD) + DONE


def test_events_have_the_times_at_which_they_were_sent() -> None:
    gaps = (0.05, 0.3, 0.1)
    pieces = [(0.2, head()), (0.1, event("a")), *((gap, event("b")) for gap in gaps), (0.0, END)]
    record = asked(pieces)
    assert (record.outcome, record.status, record.events) == ("ok", 200, 4)
    assert record.ttft is not None
    assert record.tpot is not None
    assert record.gap_p99 is not None
    assert record.gap_max is not None
    assert record.seconds is not None
    # Nothing comes before it was sent; how much later is this machine's business.
    slack = 0.03
    assert record.ttft >= 0.3
    assert record.gap_max >= 0.3 - slack
    assert record.gap_p99 == record.gap_max
    assert 4 * record.tpot >= sum(gaps) - slack
    assert record.gap_max <= 4 * record.tpot - (0.05 + 0.1 - 2 * slack)
    assert record.ttft + 4 * record.tpot <= record.seconds
    assert record.answer == "abbb"


def test_what_the_server_tells_is_kept() -> None:
    record = asked([(0.0, head()), (0.0, event("a") + event("b") + END)])
    assert (record.counted_tokens, record.completion_tokens) == (7, 5)
    assert (record.queue_seconds, record.prefill_seconds) == (0.25, 0.125)
    assert (record.commit_len, record.steps, record.replica) == (2.5, 2, "http://a:1")
    assert record.fingerprint == "fp"


def test_times_by_hand() -> None:
    record = blank(completion_tokens=401)
    gaps = [0.01] * 197 + [3.0, 1.0, 2.0]
    times = [5.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    note_times(times, record)
    assert record.gap_max == pytest.approx(3.0)
    assert record.gap_p99 == pytest.approx(2.0)
    assert record.tpot == pytest.approx((1.97 + 6.0) / 400)


def test_one_event_has_no_gaps_and_one_token_no_time_of_its_own() -> None:
    record = blank(completion_tokens=1)
    note_times([0.5], record)
    assert (record.gap_p99, record.gap_max, record.tpot) == (None, None, None)


@pytest.mark.parametrize(
    "pieces",
    [
        [(0.0, head()), *[(0.05, b": ping\n\n")] * int(LONG / 0.05)],
        [(0.0, head()), *[(0.05, b"x")] * int(LONG / 0.05)],
        [(0.0, head()), *[(0.05, event("a"))] * int(LONG / 0.05)],
        [(0.0, b"HTTP/1.1 200 X\r\nx: "), *[(0.05, b"y")] * int(LONG / 0.05)],
        [(0.0, head(503)), *[(0.05, b"y")] * int(LONG / 0.05)],
        [(LONG, head())],
    ],
    ids=["comments", "bytes", "events", "headers", "refusal", "silence"],
)
def test_the_whole_request_has_a_limit_not_each_read(pieces: list[Piece]) -> None:
    record = asked(pieces, timeout=0.4)
    assert record.reason == "timeout"
    assert record.outcome == "failed"
    assert record.seconds is not None
    assert 0.4 <= record.seconds < LONG


@pytest.mark.parametrize(
    ("told", "seconds"),
    [("7", 7.0), ("2.5", 2.5), ("0", 0.0), ("nan", None), ("inf", None), ("-3", None),
     ("1e5", None), ("1_0", None), ("soon", None), ("", None), ("9" * 400, None),
     ("Mon, 99 Foo 2020 00:00:00 GMT", None), ("Mon, 06 Jan 2020 00:00:00 GMT", 0.0)],
)  # fmt: skip
def test_retry_after_is_a_number_or_a_date(told: str, seconds: float | None) -> None:
    record = asked([(0.0, head(429, retry_after=told) + b'{"error": {"code": "full"}}')])
    assert (record.outcome, record.status) == ("refused", 429)
    assert record.retry_after == seconds


def test_retry_after_may_be_a_moment_to_come() -> None:
    told = format_datetime(datetime.now(UTC) + timedelta(seconds=600), usegmt=True)
    record = asked([(0.0, head(503, retry_after=told))])
    assert record.retry_after is not None
    assert 500 < record.retry_after <= 600


def test_a_full_queue_and_a_wait_too_long_are_told_apart() -> None:
    reasons = []
    for why in ("queue_full", "queue_timeout"):
        error = refusal(SaturatedError(why, 3.0), "m", 1.0)
        record = asked([(0.0, head(error.status) + error.body())])
        reasons.append(record.reason)
    assert reasons == [
        "rate_limit_exceeded: All replicas are saturated and the gateway's queue is full",
        "rate_limit_exceeded: All replicas stayed saturated for as long as a request may wait",
    ]


def test_a_reason_is_the_same_whatever_number_is_in_it() -> None:
    answers = [b'{"error": {"code": "c", "message": "Used %d. Wait."}}' % n for n in (7, 8123)]
    assert {asked([(0.0, head(429) + one)]).reason for one in answers} == {"c: Used N"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"", "400"), (b"[" * 100_000, "400"), (b'{"error": {"code": null, "type": "t"}}', "t"),
     (b'{"error": {"code": "long", "message": "m"}}', "long")],
)  # fmt: skip
def test_a_refusal_has_the_reason_that_it_gives(body: bytes, reason: str) -> None:
    assert asked([(0.0, head(400) + body)]).reason == reason


def test_clients_that_leave_know_what_they_left() -> None:
    told = head(x_longleaf_simulated="simulated:c:x2")
    record = asked([(0.0, told + event("a") + event("b")), (LONG, END)], leave_after=2)
    assert (record.outcome, record.events) == ("cancelled", 2)
    assert record.fingerprint == "simulated:c:x2"


def test_an_answer_that_breaks_off_failed() -> None:
    assert asked([(0.0, head() + event("a"))]).reason == "broke off"
    assert asked([(0.0, head() + DONE)]).reason == "broke off"
    error = b'data: {"error": {"code": "stream_interrupted"}}\n\n'
    assert asked([(0.0, head() + event("a") + error)]).reason == "stream: stream_interrupted"
