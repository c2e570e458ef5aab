import math
from collections.abc import Sequence
from dataclasses import astuple, replace

import pytest

from longleaf.capacity.check import (
    Check,
    Checked,
    Seen,
    in_ms,
    poisson_jobs,
    summarize,
    usual_requests,
)
from longleaf.capacity.model import Model, Objective
from longleaf.capacity.traffic import normalized, parse_kind
from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.options import SchedulerOptions
from longleaf.embedded.tokenizer import Tokenizer
from longleaf.simulate.commits import load_commits
from longleaf.simulate.curve import Curve, load_curve
from longleaf.simulate.offline import Job, Offline
from tests.capacity.flat import flat

SHORT = ("1:4k:200:prose",)
MIXED = ("0.7:4k:200:prose", "0.3:32k:200:code")
CACHED = ("1:185k+160k:256:code",)
"""Of which a pool holds one."""
TOKENIZER = Tokenizer.load(DEFAULT_MODELS / "tiny-target")
LIMITS = SchedulerOptions(
    context_length=218_000,
    max_total_tokens=218_000,
    chunked_prefill_size=8192,
    prefill_first=True,
)


def check(curve: Curve, *mix: str, rate: float, requests: int = 200) -> Check:
    kinds = normalized([parse_kind(word) for word in mix])
    return Check(curve, load_commits(), kinds, LIMITS, TOKENIZER, rate, requests)


def model(*mix: str) -> Model:
    kinds = normalized([parse_kind(word) for word in mix])
    return Model(load_curve("h200-ddtree"), load_commits(), kinds, 218_000, 8)


def mean(seen: Seen | None) -> float:
    assert seen is not None
    return seen.mean


@pytest.mark.parametrize(("mix", "requests"), [(SHORT, 600), (MIXED, 2400), (CACHED, 600)])
def test_a_replica_serves_in_simulation_what_the_formulas_say(
    mix: tuple[str, ...], requests: int
) -> None:
    """Under half of the most, times to the first token; under twice, the throughput."""
    one = model(*mix)
    rate = 0.5 * one.most_per_replica
    seen = check(one.curve, *mix, rate=rate, requests=requests).run(1)
    for told, expected in zip(seen.ttft, one.at(rate, 1).ttft, strict=True):
        assert mean(told) == pytest.approx(expected, rel=0.25)
    if one.one_at_a_time:
        assert mean(seen.tpot) == pytest.approx(one.at(rate, 1).tpot, rel=0.03)
    _, jobs = poisson_jobs(one.kinds, 2 * one.most_per_replica, 300, 1)
    served = Offline(one.curve, load_commits(), LIMITS, TOKENIZER).run(jobs)
    last = max(each.job.at + (each.end or 0.0) for each in served)
    assert 300 / last == pytest.approx(one.most_per_replica, rel=0.15)


def one_queue(jobs: Sequence[Job], replicas: int) -> list[float]:
    """Times to the first token of prompts of 1 s, if each goes to the server that is free first."""
    free, times = [0.0] * replicas, []
    for job in jobs:
        first = free.index(min(free))
        free[first] = max(free[first], job.at) + 1.0
        times.append(free[first] - job.at)
    return times


@pytest.mark.parametrize(
    ("replicas", "simulated", "requests"), [(2, 2, 2000), (16, 16, 640), (100, 16, 640)]
)
def test_replicas_share_one_queue(replicas: int, simulated: int, requests: int) -> None:
    """At 80 %, forwards of one prompt. A large fleet is simulated by a part of it."""
    one = replace(
        check(flat(), "1:1000:1", rate=0.8 * replicas, requests=requests),
        limits=replace(LIMITS, chunked_prefill_size=1000),
    )
    seen = one.run(replicas)
    assert (seen.replicas, seen.simulated) == (replicas, simulated)
    assert seen.requests == requests * 3 // 4
    _, jobs = poisson_jobs(one.kinds, 0.8 * simulated, requests, 1)
    counted = one_queue(jobs, simulated)[requests // 4 :]
    assert mean(seen.ttft[0]) == pytest.approx(sum(counted) / len(counted), rel=1e-3)
    assert seen.tpot is None


def test_cached_tokens_are_context_and_take_no_prefill() -> None:
    """At 1/50 of the most: what one request takes alone."""
    mix = "1:185k+160k:256:code"
    one = model(mix)
    rate = 0.02 * one.most_per_replica
    seen = check(one.curve, mix, rate=rate, requests=100).run(1)
    alone = one.curve.prompt_seconds(185_000, 160 * 1024)
    assert 4 < alone < 5
    assert mean(seen.ttft[0]) == pytest.approx(alone, rel=0.05)
    step = one.curve.step_seconds([185_128])
    assert mean(seen.tpot) == pytest.approx(step / load_commits().mean("code"), rel=0.05)


def test_kinds_alike_are_told_apart() -> None:
    curve = load_curve("h200-ddtree")
    seen = check(curve, "1:32k+16k:100", "1:16k:100", rate=0.01).run(1)
    warm, cold = curve.prompt_seconds(32_768, 16_384), curve.prompt_seconds(16_384)
    assert abs(warm / cold - 1) > 0.1
    assert mean(seen.ttft[0]) == pytest.approx(warm, rel=0.02)
    assert mean(seen.ttft[1]) == pytest.approx(cold, rel=0.02)


def test_a_kind_that_did_not_come_is_not_there() -> None:
    seen = check(flat(), "1:100:1", "1e-9:200:1", rate=1).run(1)
    assert seen.ttft[0] is not None
    assert seen.ttft[1] is None


@pytest.mark.parametrize(("steps", "requests"), [(0, 1000), (94, 1000), (250, 400), (10_000, 200)])
def test_long_answers_take_fewer_requests(steps: float, requests: int) -> None:
    assert usual_requests(steps) == requests


def test_a_summary_by_hand() -> None:
    """The parts' means are 2, 4 and 6: a standard deviation of 2."""
    seen = summarize([[1.0, 3.0], [4.0], [], [6.0]])
    assert seen is not None
    assert astuple(seen) == pytest.approx((4, 3.5, 6.0, 2 * 2 / math.sqrt(3)))
    assert summarize([[float(n) for n in range(200, 0, -1)]]) == Seen(200, 100.5, 198.0, None)
    assert summarize([[], []]) is None


def test_time_per_token_and_spread_by_hand() -> None:
    """Answers of two tokens: one step of 10 ms, which no prompt interrupts at this rate."""
    seen = check(flat(), "1:10:2", rate=0.01, requests=80).run(1)
    for told in (seen.tpot, *seen.ttft):
        assert told is not None
        assert astuple(told) == pytest.approx((60, 0.01, 0.01, 0.0))


@pytest.mark.parametrize(
    ("objective", "missed"),
    [
        (Objective(ttft_ms=1000, tpot_ms=20), []),
        (Objective(ttft_ms=500, ttft_ms_per_1k=500), []),
        (Objective(ttft_ms=999), ["TTFT of 1000 tokens 1000 ms"]),
        (Objective(ttft_ms=500, ttft_ms_per_1k=499), ["TTFT of 1000 tokens 1000 ms"]),
        (Objective(tpot_ms=19.9), ["TPOT 20 ms"]),
        (Objective(ttft_ms=1, tpot_ms=1), ["TTFT of 1000 tokens", "TPOT 20 ms"]),
    ],
)
def test_what_misses_the_objective(objective: Objective, missed: list[str]) -> None:
    kinds = [parse_kind("1:1000:9"), parse_kind("1:2000:9")]
    seen = Checked(1, 1, 10, (Seen(10, 1.0, 1.2, 0.1), None), Seen(10, 0.02, 0.03, None))
    assert seen.meets(objective, kinds) is not bool(missed)
    told = seen.missed(objective, kinds)
    assert len(told) == len(missed)
    for words, start in zip(told, missed, strict=True):
        assert words.startswith(start)


@pytest.mark.parametrize(
    ("objective", "start"),
    [
        (Objective(ttft_ms=1000), "within the objective"),
        (Objective(ttft_ms=901), "missed by less than the spread: TTFT of 1000 tokens"),
        (Objective(ttft_ms=899), "missed: TTFT of 1000 tokens"),
        (Objective(ttft_ms=901, tpot_ms=19), "missed: TTFT of 1000 tokens"),
        (Objective(tpot_ms=19.9), "missed: TPOT"),
    ],
)
def test_a_miss_within_the_spread_is_told(objective: Objective, start: str) -> None:
    """TTFT 1 s ± 0.1; TPOT's spread is not known."""
    kinds = [parse_kind("1:1000:9")]
    seen = Checked(1, 1, 10, (Seen(10, 1.0, 1.2, 0.1),), Seen(10, 0.02, 0.03, None))
    assert seen.verdict(objective, kinds).startswith(start)
    assert seen.nearly(objective, kinds) is ("by less" in start)


@pytest.mark.parametrize(
    ("seconds", "digits", "words"),
    [
        (23.1124, 4, "23112"),  # not 2.311e+04, which is within 23,110 too
        (1.0, 4, "1000"),
        (0.9994, 4, "999.4"),
        (0.0018449, 4, "1.845"),
        (0.0943, 2, "94"),
        (1.68, 2, "1680"),
        (0.0000067, 2, "0.0067"),
        (0.0, 4, "0"),
        (math.inf, 4, "inf"),
    ],
)
def test_milliseconds_in_words(seconds: float, digits: int, words: str) -> None:
    assert in_ms(seconds, digits) == words


def test_a_request_alone_waits_for_nobody() -> None:
    """At a rate that no fleet keeps up with: 1 s of prefill, then steps of 10 ms."""
    shares: list[float] = []
    seen = check(flat(), "1:1000:2", rate=1e6, requests=10).alone(shares.append)
    assert seen.requests == 480, "as many as of the largest fleets, less those that fill them"
    assert mean(seen.ttft[0]) == pytest.approx(1.0, rel=1e-3), "first tokens recur"
    assert mean(seen.tpot) == pytest.approx(0.01)
    assert shares[-1] == 1
