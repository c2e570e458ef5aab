import json
import math
from pathlib import Path
from typing import Any

import pytest

from longleaf.simulate.commits import CommitsError, load_commits
from longleaf.simulate.curve import Curve, CurveError, load_curve, parse_curve

GRID: dict[str, Any] = {
    "name": "grid",
    "nodes": 9,
    "kv_bytes_per_token": 100,
    "steps": [
        {"context": 1000, "batch": 1, "seconds": 0.010},
        {"context": 3000, "batch": 1, "seconds": 0.014},
        {"context": 1000, "batch": 4, "seconds": 0.020},
        {"context": 3000, "batch": 4, "seconds": 0.030},
    ],
    "prefill": [
        {"context": 1000, "cached": 0, "seconds": 0.1},
        {"context": 5000, "cached": 1000, "seconds": 0.8},
    ],
}


def grid() -> Curve:
    return parse_curve(GRID, "grid")


@pytest.mark.parametrize(
    ("contexts", "seconds"),
    [
        ([1000], 0.010),  # recorded
        ([2000], 0.012),  # between two contexts
        ([5000], 0.018),  # beyond the last: the line goes on
        ([0], 0.008),
        ([2000] * 4, 0.025),
        ([1000, 3000, 1000, 3000], 0.025),  # the mean context counts
        ([2000] * 2, 0.012 + (0.025 - 0.012) / 3),  # between two batches
        ([2000] * 8, 0.025 + 4 * (0.025 - 0.015) / 4),  # beyond: what context costs, once each
    ],
)
def test_step_time(contexts: list[int], seconds: float) -> None:
    assert grid().step_seconds(contexts) == pytest.approx(seconds)


def test_prefill_time() -> None:
    curve = grid()
    assert curve.prompt_seconds(5000) == pytest.approx(0.9)
    assert curve.prompt_seconds(5000, cached=1000) == pytest.approx(0.8)
    assert curve.prefill_seconds([(1000, 2000)]) == pytest.approx(0.2)
    assert curve.prefill_seconds([(1000, 2000), (0, 1000)]) == pytest.approx(0.3)
    assert curve.prefill_seconds([(4999, 5000)]) == 0.1, "no forward is shorter than any recorded"


def test_the_packaged_curve_is_the_recording() -> None:
    curve = load_curve("h200-ddtree")
    assert curve.source["gpu"] == "NVIDIA H200"
    assert curve.nodes == 9
    assert curve.step_seconds([65_536]) == 0.007473
    assert curve.step_seconds([185_000]) == 0.011248
    assert curve.step_seconds([131_072] * 2) == 0.014033
    assert curve.step_seconds([32_768] * 8) == 0.014437
    assert curve.prompt_seconds(131_072, cached=65_536) == pytest.approx(11.2885 - 3.0621)
    assert curve.prompt_seconds(185_000) == pytest.approx(22.3499)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"nodes": None}, "nodes is missing"),
        ({"steps": []}, "steps must be a list of at least one object"),
        ({"steps": [{"context": 1, "batch": 1}]}, "steps: seconds is missing"),
        (
            {"steps": [{"context": 1, "batch": 1, "seconds": True}]},
            "steps: seconds must be a finite number",
        ),
        (
            {"steps": [{"context": 10**400, "batch": 1, "seconds": 1}]},
            "steps: context must be a finite number of at most 1e",
        ),
        ({"kv_bytes_per_token": float("inf")}, "kv_bytes_per_token must be a finite number"),
        ({"kv_bytes_per_token": float("nan")}, "kv_bytes_per_token must be a finite number"),
        (
            {"prefill": [{"context": 5, "cached": 5, "seconds": 1}]},
            "cached must be less than context 5, got 5",
        ),
        *(
            ({"name": name}, "name must be 1 to 64 printable ASCII characters without quotes")
            for name in ("", 5, "a\nb", 'a"b', "a'b", "\u00e9", "a\x7f", "n" * 65)
        ),
        (
            {"steps": [{**row, "seconds": 0} for row in GRID["steps"]]},
            "steps: seconds must not all be 0",
        ),
        (
            {"prefill": [{**row, "seconds": 0} for row in GRID["prefill"]]},
            "prefill: seconds must not all be 0",
        ),
        (
            {"steps": [*GRID["steps"], {"context": 3000, "batch": 4, "seconds": 0.04}]},
            "steps: two of context 3000 and batch 4",
        ),
        (
            {"prefill": [*GRID["prefill"], {"context": 5000, "cached": 0, "seconds": 0.9}]},
            "prefill: two of context 5000",
        ),
    ],
)
def test_a_wrong_curve_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(CurveError, match=words):
        parse_curve({**GRID, **change}, "file")


def test_a_name_may_hold_what_a_header_may() -> None:
    name = "8 x H200 (x1), a/b: 100%!".ljust(64, "~")
    assert parse_curve({**GRID, "name": name}, "file").name == name


def test_some_steps_may_take_no_time() -> None:
    steps = [{**GRID["steps"][0], "seconds": 0}, *GRID["steps"][1:]]
    assert parse_curve({**GRID, "steps": steps}, "file").step_seconds([1000]) == 0


def test_a_curve_that_is_not_there() -> None:
    with pytest.raises(CurveError, match=r"one of .*h200-ddtree"):
        load_curve("h300")


def test_commit_lengths(tmp_path: Path) -> None:
    path = tmp_path / "commits.json"
    path.write_text(json.dumps({"kinds": {"prose": [6, 3, 0, 1]}}))
    commits = load_commits(path)
    drawn = [commits.drafts("prose", (n + 0.5) / 1000) for n in range(1000)]
    assert [drawn.count(n) for n in range(5)] == [600, 300, 0, 100, 0]
    assert commits.mean("prose") == pytest.approx(1 + sum(drawn) / 1000)


def test_the_packaged_commit_lengths() -> None:
    commits = load_commits()
    assert commits.kinds == ("predictable", "code", "prose")
    assert 7.5 < commits.mean("predictable") <= 8
    assert commits.mean("code") == pytest.approx(3.785, abs=0.001)
    assert commits.mean("prose") == pytest.approx(2.712, abs=0.001)


@pytest.mark.parametrize(
    "kinds",
    [
        None,
        {},
        {"prose": []},
        {"prose": [0, 0]},
        {"prose": [-1, 2]},
        {"prose": [math.inf]},
        {"prose": [1, math.nan]},
        {"prose": [10**400]},
        {"prose": [True]},
    ],
)
def test_wrong_commit_lengths_are_named(tmp_path: Path, kinds: object) -> None:
    path = tmp_path / "commits.json"
    path.write_text(json.dumps({"kinds": kinds}))
    with pytest.raises(CommitsError, match="kinds"):
        load_commits(path)


def test_files_nested_too_deep_are_named(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(CommitsError, match=r"deep.json: not valid JSON: .*recursion"):
        load_commits(path)
    with pytest.raises(CurveError, match=r"deep.json: not valid JSON: .*recursion"):
        load_curve(str(path))


def test_what_is_extrapolated_is_said() -> None:
    assert grid().beyond(4, 3000) == []
    batch, context = grid().beyond(5, 3001)
    assert "recorded up to batch 4" in batch
    assert "up to 3000 tokens" in context
