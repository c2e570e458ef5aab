import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from longleaf.capacity.command import capacity_command
from longleaf.capacity.model import CapacityError, Model, Objective
from longleaf.capacity.traffic import Kind, TrafficError, load_kinds, normalized, parse_kind
from longleaf.simulate.commits import load_commits
from longleaf.simulate.curve import CURVES, Curve, load_curve
from tests.capacity.flat import flat

MIXED = ("0.7:4k:200:prose", "0.3:32k:200:code")


def model(*mix: str, curve: Curve | None = None, pool: int = 218_000, sequences: int = 8) -> Model:
    kinds = normalized([parse_kind(word) for word in mix])
    return Model(curve or load_curve("h200-ddtree"), load_commits(), kinds, pool, sequences)


def test_formulas_by_hand() -> None:
    one = model("1:1000:101:predictable", curve=flat(), pool=8_000, sequences=4)
    steps = 100 / load_commits().mean("predictable")
    assert one.mean_prefill == pytest.approx(1.0)
    assert one.mean_steps == pytest.approx(steps)
    assert one.batch_limit == 4
    assert one.most_per_replica == pytest.approx(1 / (1.0 + steps * 0.01 / 4))
    state = one.at(0.5, 1)
    assert state.utilization == pytest.approx(0.5 / one.most_per_replica)
    assert state.tpot == pytest.approx(0.01 * steps / 100 / 0.5, rel=0.01)
    assert state.wait == pytest.approx(0.5 * 1.0 * 0.5 / 0.5)  # M/D/1: u P / (2 (1 - u))
    assert state.ttft[0] == pytest.approx(state.wait + 1.0)
    assert math.isinf(one.at(2.0, 1).wait)


def test_answers_that_run_together_by_hand() -> None:
    one = model("1:100:2001:predictable", curve=flat(), pool=8_000, sequences=4)
    state = one.at(1.0, 1)
    together = 2000 / load_commits().mean("predictable") * 0.01 / (1 - 0.1)
    assert state.batch == pytest.approx(together)
    assert state.kv_tokens == pytest.approx(together * (100 + 2001 / 2 + 9))


def test_one_request_at_a_time_by_hand() -> None:
    """M/D/1 with all of a request's time; nothing interrupts its answer."""
    one = model("1:1000:101:predictable", curve=flat(), pool=2_000, sequences=4)
    steps = 100 / load_commits().mean("predictable")
    taken, state = 1.0 + steps * 0.01, one.at(0.5, 1)
    assert state.tpot == pytest.approx(0.01 * steps / 100)
    used = 0.5 * taken
    assert state.wait == pytest.approx(used * taken / (2 * (1 - used)))
    assert state.ttft[0] == pytest.approx(state.wait + 1.0)


def test_a_pool_bounds_the_batch() -> None:
    one = model("1:1000:100:prose", curve=flat(), pool=2_500, sequences=8)
    assert one.batch_limit == pytest.approx(2_500 / (1000 + 50 + 9))


def test_cached_tokens_are_not_prefilled() -> None:
    assert model("1:5000+4000:10", curve=flat()).mean_prefill == pytest.approx(1.0)


def test_more_traffic_needs_more() -> None:
    one = model(*MIXED)
    sizes = [one.replicas_for(rate, Objective()).replicas for rate in (0.5, 2, 8, 32)]
    assert sizes == sorted(set(sizes))
    least = 32 / (one.most_per_replica * 0.9)
    assert least <= sizes[-1] < least + 1
    strict = Objective(ttft_ms=1050)
    assert one.replicas_for(8, strict).replicas > one.replicas_for(8, Objective()).replicas
    assert max(one.replicas_for(8, strict).ttft) <= 1.05


@pytest.mark.parametrize(
    ("objective", "why"),
    [
        (Objective(ttft_ms=1000), "prefill of 32768 tokens alone takes 1007 ms"),
        (Objective(tpot_ms=1), "one answer alone takes"),
    ],
)
def test_what_no_fleet_can_do_is_said(objective: Objective, why: str) -> None:
    with pytest.raises(CapacityError, match=why):
        model(*MIXED).replicas_for(1, objective)


def test_what_does_not_fit_or_was_not_recorded_is_said() -> None:
    with pytest.raises(CapacityError, match="does not fit a KV pool of 100000"):
        model("1:185k:10", pool=100_000)
    with pytest.raises(CapacityError, match="prefill up to 10000 tokens"):
        model("1:10001:10", curve=flat())


def run(*arguments: str) -> Any:
    return CliRunner().invoke(capacity_command, ["--check-requests", "40", *arguments])


def test_the_answer_shows_its_formulas() -> None:
    result = run("--rate", "0.4", "--mix", "0.7:4k:200", "--mix", "0.3:32k+16k:200:code",
                 "--node-cost", "20")  # fmt: skip
    assert result.exit_code == 0, result.output
    head = result.stdout.splitlines()[0]
    assert "replicas" in head
    assert "gateway pods" in head
    assert "TTFT of 32768 tokens (16384 cached, 16384 to compute) = W" in result.output
    assert "The formulas gave 1 replicas. Simulated" in result.output
    for words in ("W    = (1 + c^2)", "a replica serves 1 / (", "GiB a GPU", "cost: ", "simulated"):
        assert words in result.output


def test_the_answer_as_json() -> None:
    result = run("--rate", "4", "--mix", "0.9:4k:200", "--mix", "0.1:185k:200", "--json",
                 "--node-cost", "20")  # fmt: skip
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["nodes"] == 9
    hourly = answer["replicas"] * 20 / (4 * 3600 * 200) * 1e6
    assert answer["cost_per_million_answer_tokens"] == pytest.approx(hourly)
    assert answer["kv_pool_tokens"] >= 185_000 + 200 + 9
    assert answer["kv_pool_bytes"] == answer["kv_pool_tokens"] * 61 * 1152
    assert [kind["prompt_tokens"] for kind in answer["kinds"]] == [4096, 185_000]
    assert [kind["uncached_tokens"] for kind in answer["kinds"]] == [4096, 185_000]
    assert answer["curves_left_out"] == []
    assert answer["extrapolated"] == ["the curve was recorded up to 185000 tokens of context"]


def test_what_was_not_recorded_is_told(tmp_path: Path) -> None:
    plain = json.loads((CURVES / "h200-plain.json").read_text())
    short = tmp_path / "short.json"
    ends = [row for row in plain["prefill"] if row["context"] <= 65_536]
    short.write_text(json.dumps({**plain, "name": "short", "prefill": ends}))
    one = {**json.loads((CURVES / "h200-ddtree.json").read_text()), "name": "one"}
    lone = tmp_path / "one.json"
    lone.write_text(json.dumps({**one, "steps": [s for s in one["steps"] if s["batch"] == 1]}))
    result = run("--rate", "4", "--mix", "0.9:4k:200", "--mix", "0.1:185k:200", "--json",
                 "--curve", str(short), "--curve", str(lone))  # fmt: skip
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert "prefill up to 65536 tokens" in answer["curves_left_out"][0]
    assert "recorded up to batch 1:" in answer["extrapolated"][0]


def test_replicas_that_the_simulation_adds_are_explained() -> None:
    """The formulas know no bursts: prompts that come together interrupt each other's answers."""
    arguments = ("--rate", "5", "--mix", "1:4k:400:prose", "--tpot-ms", "4.8")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    answer = json.loads(run(*arguments, "--json").stdout)
    formulas, replicas = answer["replicas_by_formulas"], answer["replicas"]
    assert formulas < replicas
    assert f"The formulas gave {formulas} replicas." in result.output
    assert f"simulating {formulas} replicas ... missed" in result.stderr
    assert f"simulating {replicas} replicas ... within the objective" in result.stderr
    assert len(result.stderr.splitlines()) == 1 + len(answer["simulated"]), "and each request alone"
    assert "simulating" not in result.stdout
    assert re.search(
        rf"^ +{formulas} replicas: missed by less than the spread: TPOT .* objective 4\.8 ms$",
        result.stdout,
        re.M,
    )
    assert re.search(rf"^ +{replicas} replicas: within the objective$", result.output, re.M)
    tried = {one["replicas"]: bool(one["missed"]) for one in answer["simulated"]}
    assert tried[replicas - 1]
    assert not tried[replicas]


def test_what_a_lone_request_misses_is_said_before_a_large_fleet_is_simulated() -> None:
    """A token takes 1.76 ms by the formulas, but those drawn take a little more."""
    result = run("--rate", "2", "--mix", "1:1k:64", "--tpot-ms", "1.77")
    assert result.exit_code == 1
    assert "no fleet meets the objective in simulation, for a request alone" in result.stderr
    assert "TPOT 1.792 ms" in result.stderr
    assert result.stdout == ""
    assert re.findall(r"^simulating (.*) \.\.\.", result.stderr, re.M) == ["each request alone"]


@pytest.mark.parametrize("requests", ["100", "1000"])
def test_the_number_of_requests_does_not_decide(requests: str) -> None:
    answer = json.loads(
        CliRunner().invoke(
            capacity_command,
            ["--rate", "4", "--mix", "0.9:4k:256", "--mix", "0.1:185k:256", "--ttft-ms", "30000",
             "--check-requests", requests, "--json"],
        ).stdout
    )  # fmt: skip
    assert (answer["replicas_by_formulas"], answer["replicas"]) == (12, 12)


def test_the_best_curve_decides_the_tree() -> None:
    answer = json.loads(run("--rate", "1", "--mix", "1:4k:2000:predictable", "--json").stdout)
    budgets = {one["curve"]: one["token_ms"] for one in answer["tree_budget"]}
    assert budgets["h200-ddtree"] < budgets["h200-plain"] / 5
    assert answer["nodes"] == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1"], "no traffic"),
        (["--rate", "1", "--mix", "1:4k"], "is not SHARE:PROMPT"),
        (["--rate", "1", "--mix", "0:4k:2"], "share must be above 0"),
        (
            ["--rate", "1", "--mix", "1:4k+4k:2"],
            "cached_tokens must be a whole number less than",
        ),
        (["--rate", "1", "--mix", "1:4k:2:poetry"], "text 'poetry' is none of predictable"),
        (["--rate", "1", "--mix", f"1:{'9' * 400}:2"], "is no number of tokens"),
        (["--rate", "1", "--mix", f"1:{'9' * 9}:2"], "prompt_tokens must be at most 1,000,000"),
        (["--rate", "1", "--mix", "1e300:4k:2"], "share must be at most 1e+09"),
        (["--rate", "1", "--mix", "1:4x:2"], "prompt '4x' is no number of tokens"),
        (["--rate", "0", "--mix", "1:4k:2"], "0.0 is not in the range"),
        (["--rate", "nan", "--mix", "1:4k:2"], "nan is not a finite number"),
        (["--rate", "1", "--mix", "1:4k:2", "--gateway-cores", "0"], "0.0 is not in the range"),
        (["--rate", "1", "--mix", "1:4k:2", "--gateway-ms", "-1"], "-1.0 is not in the range"),
        (["--rate", "1", "--mix", "1:4k:2", "--node-cost", "nan"], "nan is not a finite number"),
        (
            ["--rate", "1", "--mix", "1:4k:2", "--ttft-ms-per-1k", "9"],
            "--ttft-ms, which is missing",
        ),
        (["--rate", "1", "--mix", "1:4k:2", "--commit-len", "/"], "/: Is a directory"),
        (["--rate", "1", "--mix", "1:4k:2", "--curve", "/dev/null/x.json"], "Not a directory"),
    ],
)
def test_wrong_traffic_is_named(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert message in result.output


def test_a_mix_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mix.json"
    path.write_text('[{"share": 1, "prompt_tokens": 100, "answer_tokens": 5, "text": "code"}]')
    assert load_kinds(path) == [Kind(1, 100, 5, "code")]
    path.write_text('[{"share": 1, "prompt_tokens": 100, "answer": 5}]')
    with pytest.raises(TrafficError, match="answer is not known"):
        load_kinds(path)
    for row, message in (
        ('{"share": Infinity, "prompt_tokens": 9, "answer_tokens": 5}', "share must be above 0"),
        ('{"share": 1, "prompt_tokens": 9.5, "answer_tokens": 5}', "prompt_tokens must be a whole"),
        ('{"share": 1, "prompt_tokens": 9, "answer_tokens": 5, "text": []}', "must be a string"),
        (f'{{"share": {"9" * 400}, "prompt_tokens": 9, "answer_tokens": 5}}', "share must be at"),
        (f'{{"share": 1, "prompt_tokens": {"9" * 400}}}', "prompt_tokens must be at most"),
        (f'{{"share": 1, "prompt_tokens": {"9" * 5000}}}', "integer string conversion"),
        (
            '{"share": 1, "prompt_tokens": 9, "answer_tokens": 5, "cached_tokens": true}',
            "cached_tokens must be a whole number",
        ),
        ("[" * 100_000, "recursion"),
    ):
        path.write_text(f"[{row}]")
        with pytest.raises(TrafficError, match=message):
            load_kinds(path)
