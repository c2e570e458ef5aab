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
    assert [one.at for one in first] == sorted(one.at for one in first)


def test_distributions() -> None:
    random_ = random.Random(1)

    def drawn(value: Any) -> list[int]:
        draw = lengths(value, "length").draw
        return [draw(random_) for _ in range(4000)]

    assert set(drawn("16k")) == {16_384}
    assert set(drawn("185k")) == {185_000}
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
        ({"phase": [{**PHASE, "burst": -1}]}, r"phase\[0\].burst must be between 0 and 100"),
        ({"phase": [{**PHASE, "speed": 1}]}, r"phase\[0\].speed is not known"),
        ({"prompts": {}}, "prompts.length is missing"),
        ({"prompts": {"length": "gauss 1k 2"}}, "is no distribution of lengths"),
        ({"prompts": {"length": "uniform 2k 1k"}}, "second length is less"),
        ({"prompts": {"length": "1x"}}, "is no number of tokens"),
        ({"prompts": {"length": []}}, "at least one part"),
        ({"prompts": {"length": "1k", "texts": {"poetry": 1}}}, "prompts.texts must give shares"),
        ({"api": "embeddings"}, "api must be one of chat, completions"),
        ({"cancel": {"share": 1.5}}, "cancel.share must be between 0 and 1"),
        ({"documents": {"share": 0.5}}, "documents.length is missing"),
        ({"turns": {"count": 0}}, "turns.count must be a whole number of at least 1"),
        ({"colour": 1}, "colour is not known; a plan has"),
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


def test_a_trace_brings_its_times(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 5000, "input_length": 300, "output_length": 20},
        {"timestamp": 7000, "prompt_tokens": 900, "max_tokens": 30, "text": "code"},
        {"timestamp": 9000, "prompt_tokens": 400},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one = parse_plan({"trace": "t.jsonl"}, tmp_path, rate_factor=2.0)
    assert [line.at for line in one.trace] == [0.0, 2.0, 4.0]
    assert one.seconds == 2.0  # twice as fast
    assert one.phases[0].rate == 1.5
    assert (one.trace[1].prompt_tokens, one.trace[1].text) == (900, "code")
    (tmp_path / "t.jsonl").write_text('{"prompt_tokens": 0}')
    with pytest.raises(PlanError, match=r"t.jsonl:1: prompt_tokens must be a whole number"):
        parse_plan({"trace": "t.jsonl"}, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "t.jsonl:1: must be an object, got 3"),
        ('{"prompt_tokens": 9, "timestamp": "x"}', "timestamp must be a number of milliseconds"),
        ('{"prompt_tokens": 9, "timestamp": NaN}', "timestamp must be a number of milliseconds"),
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


def test_factors_change_rates_and_seconds(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[[phase]]\nseconds = 10\nrate = 2.0\n[prompts]\nlength = "1k"')
    one = load_plan(path, rate_factor=3.0, longer=2.0)
    assert (one.seconds, one.phases[0].rate) == (20.0, 6.0)
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
