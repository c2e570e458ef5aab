import itertools
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from longleaf_load.arrivals import Phase, arrivals
from longleaf_load.lengths import Even, PlanError, lengths
from longleaf_load.plan import load_plan, parse_plan

ROOT = Path(__file__).resolve().parents[2]
PHASE = {"seconds": 10, "rate": 2.0}
HUGE = 10**400
"""Beyond any float."""


def plan(**values: Any) -> Any:
    return parse_plan({"phase": [PHASE], "prompts": {"length": "1k"}, **values}, Path())


@pytest.mark.parametrize("burst", [0.0, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burst(burst: float) -> None:
    times = [one.at for one in arrivals([Phase("steady", 4000.0, 2.0, 2.0, burst)], seed=3)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.5, rel=0.06)
    variation = statistics.pvariance(gaps) / statistics.fmean(gaps) ** 2
    assert variation == pytest.approx(burst, abs=0.02 + 0.15 * burst)


def test_a_ramp_goes_from_one_rate_to_the_other() -> None:
    ramp = [Phase("ramp", 1000.0, 1.0, 9.0, 0.0)]
    times = [one.at for one in arrivals(ramp, seed=1)]
    assert len(times) == pytest.approx(5000, abs=2)
    for begin, rate in ((0, 1.4), (450, 5.0), (900, 8.6)):
        count = sum(begin <= at < begin + 100 for at in times)
        assert count == pytest.approx(100 * rate, rel=0.03)


def test_phases_follow_one_another_and_seeds_repeat() -> None:
    phases = [Phase("a", 50.0, 4.0, 4.0), Phase("b", 50.0, 1.0, 1.0, 3.0)]
    first = list(arrivals(phases, 7))
    assert first == list(arrivals(phases, 7)) != list(arrivals(phases, 8))
    assert [one.number for one in first] == list(range(len(first)))
    assert all((one.at >= 50) == (one.phase == 1) for one in first)
    assert 90 < first[-1].at < 100
    assert [one.at for one in first] == sorted(one.at for one in first)


def test_distributions() -> None:
    random_ = random.Random(1)

    def drawn(value: Any) -> list[int]:
        draw = lengths(value, "length").draw
        return [draw(random_) for _ in range(4000)]

    assert set(drawn("16k")) == {16_384}
    assert set(drawn("185k")) == {185_000}  # named by a round number
    assert set(drawn("200k")) == {200_000}
    assert set(drawn("180k")) == {184_320}
    uniform = drawn("uniform 1k 3k")
    assert min(uniform) == pytest.approx(1024, 0.05)
    assert max(uniform) == pytest.approx(3072, 0.05)
    assert statistics.fmean(uniform) == pytest.approx(2048, rel=0.03)
    spread = drawn("log_uniform 1k 64k")
    assert statistics.median(spread) == pytest.approx(8192, rel=0.15)
    assert statistics.median(drawn("lognormal 4k 1.0")) == pytest.approx(4096, rel=0.08)
    mixed = drawn([{"share": 3, "length": 10}, {"share": 1, "length": "185k"}])
    assert mixed.count(10) == pytest.approx(3000, rel=0.05)


def test_even_draws_look_like_many() -> None:
    mixed = lengths([{"share": 0.7, "length": 1}, {"share": 0.3, "length": 2}], "length").draw
    for begin in (0, 40, 80):  # any forty in a row
        drawn = [mixed(Even(5, number)) for number in range(begin, begin + 40)]
        assert abs(drawn.count(2) - 12) <= 1
    assert Even(5, 3).random() == Even(5, 3).random() != Even(6, 3).random()
    spread = lengths("log_uniform 1k 64k", "length").draw
    median = statistics.median(spread(Even(1, number)) for number in range(30))
    assert median == pytest.approx(8192, rel=0.15)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"phase": []}, "phase is missing"),
        ({"phase": [{"seconds": 1, "rate": 0}]}, r"phase\[0\].rate must be a number above 0"),
        ({"phase": [{**PHASE, "burst": -1}]}, r"burst must be 0 or between 0.001 and 100, got -1"),
        ({"phase": [{**PHASE, "burst": 1e-310}]}, "burst must be 0 or between 0.001 and 100"),
        ({"phase": [{**PHASE, "burst": HUGE}]}, "burst must be 0 or between 0.001 and 100"),
        ({"phase": [{**PHASE, "rate": HUGE}]}, "rate must be a number above 0"),
        ({"phase": [{**PHASE, "rate": 1e308}]}, "phase: inf requests .* than 10,000,000"),
        ({"phase": [{**PHASE, "end_rate": 1e9}]}, r"phase: 5e\+09 requests .* than 10,000,000"),
        ({"phase": [{**PHASE, "rate": 600_000}, {**PHASE, "rate": 600_000}]}, "1.2e.07 requests"),
        ({"phase": [{"seconds": 3e6, "rate": 1e-6}]}, "seconds .* are more than 2,592,000"),
        ({"seed": HUGE}, "seed must be a whole number from 0 to 9,223,372,036,854,775,807"),
        ({"timeout_seconds": 1e300}, "timeout_seconds must be a number above 0, up to 86,400"),
        ({"turns": {"think_seconds": HUGE}}, "think_seconds must be a number above 0, up to"),
        ({"turns": {"count": 2000}}, "turns.count must be a whole number from 1 to 1,000"),
        ({"documents": {"count": 10**9}}, "documents.count must be a whole number from 1 to 1,000"),
        ({"retries": HUGE}, "retries must be a whole number from 0 to 1,000"),
        ({"cancel": {"share": HUGE}}, "cancel.share must be between 0 and 1"),
        ({"cancel": {"seconds": 0}}, "cancel.seconds must be a number above 0"),
        ({"prompts": {"length": ""}}, "prompts.length: '' is no number of tokens"),
        ({"prompts": {"length": " "}}, "prompts.length: '' is no number of tokens"),
        ({"prompts": {"length": HUGE}}, "prompts.length: .* is no number of tokens"),
        ({"prompts": {"length": "9" * 5000 + "k"}}, "prompts.length: .* is no number of tokens"),
        ({"prompts": {"length": "1k", "longest": HUGE}}, "longest must be between 1 and 1,000,000"),
        ({"answers": {"max_tokens": ""}}, "answers.max_tokens: '' is no number of tokens"),
        ({"documents": {"share": 0.5, "length": ""}}, "documents.length: '' is no number"),
        (
            {"phase": [{**PHASE, "speed": 1}]},
            r"phase\[0\].speed is not known; a phase has burst, end_rate, name, rate, seconds$",
        ),
        (
            {"phase": [{**PHASE, "stop_below": 0.5}]},
            r"phase\[0\].stop_below is not known; .*; stop_below goes at the top of the plan$",
        ),
        ({"prompts": {"length": "1k", "size": 1}}, "prompts.size .*; prompts has even, length, lo"),
        ({"prompts": {}}, "prompts.length is missing"),
        ({"prompts": {"length": "gauss 1k 2"}}, "is no distribution of lengths"),
        ({"prompts": {"length": "uniform 2k 1k"}}, "second length is less"),
        ({"prompts": {"length": "1x"}}, "is no number of tokens"),
        ({"prompts": {"length": []}}, "at least one part"),
        ({"prompts": {"length": "1k", "texts": {"poetry": 1}}}, "prompts.texts must give shares"),
        ({"api": "embeddings"}, "api must be one of chat, completions"),
        ({"cancel": {"share": 1.5}}, "cancel.share must be between 0 and 1"),
        ({"documents": {"share": 0.5}}, "documents.length is missing"),
        ({"turns": {"count": 0}}, "turns.count must be a whole number from 1 to 1,000, got 0"),
        ({"colour": 1}, "colour is not known; a plan has answers, api, cancel"),
        ({"trace": "none.jsonl"}, "trace: none.jsonl"),
        ({"trace": 3}, "trace must be a string"),
        ({"phase": [3]}, r"phase\[0\] must be a table"),
        ({"phase": [{"seconds": math.inf, "rate": 1}]}, "seconds must be a number above 0"),
        ({"prompts": {"length": "2000k"}}, "must be between 1 and 1,000,000 tokens"),
        ({"prompts": {"length": "300k"}}, "307200 tokens are more than prompts.longest, 185000"),
        ({"prompts": {"length": "uniform 1k 4k", "longest": "2k"}}, "more than prompts.longest"),
        ({"documents": {"share": 0.5, "length": "300k"}}, "documents.length: 307200 tokens"),
        (
            {"api": "completions", "documents": {"share": 0.5, "length": "2k"}},
            "documents.share needs messages: api must be chat",
        ),
        ({"api": "completions", "turns": {"count": 2}}, "turns.count needs messages"),
    ],
)
def test_wrong_plans_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**values)


def test_what_factors_make_of_a_plan_has_limits_too(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[[phase]]\nseconds = 10\nrate = 2.0\n[prompts]\nlength = "1k"')
    for rate in (1e308, 600_000.0):
        with pytest.raises(PlanError, match=r"times --rate and --longer\) are more than 10,000,0"):
            load_plan(path, rate_factor=rate)
    with pytest.raises(PlanError, match=r"2.6e\+06 seconds \(times --longer\) are more than"):
        load_plan(path, rate_factor=0.1, longer=260_000.0)
    assert load_plan(path, longer=1000.0).phases[0].expected == 20_000


def test_a_plan_that_is_nested_too_deep_is_told(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text("prompts.length = " + "[" * 100_000)
    with pytest.raises(PlanError, match=r"p.toml: nested too deep"):
        load_plan(path)


def test_a_trace_brings_its_times(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 5000, "input_length": 300, "output_length": 20},
        {"timestamp": 7000, "prompt_tokens": 900, "max_tokens": 30, "text": "code"},
        {"timestamp": 9000, "prompt_tokens": 400},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one = parse_plan({"trace": "t.jsonl"}, tmp_path, rate_factor=2.0)
    assert one.timed
    assert [line.at for line in one.trace] == [0.0, 2.0, 4.0]
    assert one.seconds == 2.0  # twice as fast
    assert one.phases[0].rate == 1.5
    assert (one.trace[1].prompt_tokens, one.trace[1].text) == (900, "code")
    slow = parse_plan({"trace": "t.jsonl"}, tmp_path, longer=2.0)
    assert (slow.seconds, slow.phases[0].expected) == (8.0, 3.0)
    (tmp_path / "t.jsonl").write_text('{"prompt_tokens": 0}')
    with pytest.raises(PlanError, match=r"t.jsonl:1: prompt_tokens must be a whole number"):
        parse_plan({"trace": "t.jsonl"}, tmp_path)
    lines = ['{"prompt_tokens": 185000}', "", '{"prompt_tokens": 199999}']
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    too_long = r"t.jsonl:3: prompt_tokens: 199999 are more than prompts.longest, 185000"
    with pytest.raises(PlanError, match=too_long):
        plan(trace=str(tmp_path / "t.jsonl"))
    longer = plan(trace=str(tmp_path / "t.jsonl"), prompts={"longest": "200k"})
    assert [line.prompt_tokens for line in longer.trace] == [185_000, 199_999]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "t.jsonl:1: must be an object, got 3"),
        ('{"prompt_tokens": 9, "timestamp": "x"}', "timestamp must be a number of milliseconds"),
        ('{"prompt_tokens": 9, "timestamp": NaN}', "timestamp must be a number of milliseconds"),
        (
            f'{{"prompt_tokens": 9, "timestamp": {HUGE}}}',
            "timestamp must be a number of milliseconds",
        ),
        (f'{{"prompt_tokens": {HUGE}}}', "t.jsonl:1: prompt_tokens must be a whole number from 1"),
        (
            '{"prompt_tokens": 9, "max_tokens": 1000001}',
            "t.jsonl:1: max_tokens must be a whole number from 1 to 1,000,000, got 1000001",
        ),
        ("[" * 100_000, "t.jsonl:1: not valid JSON: nested too deep"),
        (
            '{"prompt_tokens": 9, "timestamp": 5}\n{"prompt_tokens": 9, "timestamp": 1}',
            "t.jsonl:2: timestamp must not be before the line above, got 1",
        ),
        ("{", "t.jsonl:1: not valid JSON"),
        ("\xff", "t.jsonl: not UTF-8"),
    ],
)
def test_wrong_traces_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=message):
        parse_plan({"trace": "t.jsonl"}, tmp_path)


def test_what_a_plan_says_is_in_it() -> None:
    one = plan(stop_below=0.25, retries=3, timeout_seconds=7, prompts={"length": 9, "even": True})
    assert (one.stop_below, one.retries, one.timeout_seconds, one.even) == (0.25, 3, 7.0, True)
    assert (plan().stop_below, plan().retries, plan().timeout_seconds, plan().even) == (
        (0.0, 0, 600.0, False)
    )


def test_factors_change_rates_and_seconds(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    phase = "[[phase]]\nseconds = 10\nrate = 2.0\nend_rate = 5.0\n"
    path.write_text(f'{phase}[prompts]\nlength = "1k"')
    one = load_plan(path, rate_factor=3.0, longer=2.0)
    assert one.seconds == 20.0
    assert (one.phases[0].rate, one.phases[0].end_rate) == (6.0, 15.0)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PlanError, match="--rate must be a number above 0"):
            load_plan(path, rate_factor=wrong)
        with pytest.raises(PlanError, match="--longer must be a number above 0"):
            load_plan(path, longer=wrong)
    with pytest.raises(PlanError, match="Is a directory"):
        load_plan(tmp_path)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "loadtest" / "plans").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_plans_of_the_project_can_be_read(path: Path) -> None:
    once, twice = load_plan(path), load_plan(path, rate_factor=2.0, seed=9)
    assert once.seconds > 0
    assert twice.phases[0].rate == 2 * once.phases[0].rate
    assert twice.seed == 9
