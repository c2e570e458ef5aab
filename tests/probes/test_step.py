"""The step probe: the line, what is said of it, and two real engines side by side."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longleaf.probes.line import StepCell, fit
from longleaf.probes.step import EngineRun, StepPlan, StepRun
from tests.gateway.engine import running_engine
from tests.probes.interrupt import interrupted


def test_the_fit_finds_the_line_and_weighs_relative_errors() -> None:
    found = fit([(x, 0.005 + 2e-7 * x) for x in (1000, 16_000, 64_000)])
    assert found is not None
    assert found.constant == pytest.approx(0.005)
    assert found.slope == pytest.approx(2e-7)
    assert found.bandwidth(70_272) == pytest.approx(70_272 / 2e-7)
    assert fit([(1000, 0.005), (1000, 0.006)]) is None
    # 1 ms more at 1k is a fifth of that step: the line follows it more than the longest step.
    bent = fit([(1000, 0.006), (16_000, 0.0082), (64_000, 0.0178)])
    assert bent is not None
    assert abs(bent.at(1000) / 0.006 - 1) < 0.1
    assert fit([(0, 0.01), (1000, 0.005)]).bandwidth(1.0) is None  # type: ignore[union-attr]


def run_of(*engines: list[float], max_ratio: float | None = None) -> StepRun:
    contexts = (1024, 16_384, 65_536)
    names = tuple("ab"[: len(engines)])
    plan = StepPlan(names, names, contexts, token_bytes=70_272, peak=1.6e12, max_ratio=max_ratio)
    run = StepRun(plan, partial=False)
    for name, steps in zip(names, engines, strict=True):
        cells = [
            StepCell(context, [step], [4.0], float(context))
            for context, step in zip(contexts, steps, strict=False)
        ]
        run.engines.append(EngineRun(name, cells, 70_272))
    return run


LINE = [0.005 + 1e-7 * context for context in (1024, 16_384, 65_536)]


def test_the_ratio_is_to_reading_at_the_cards_peak() -> None:
    run = run_of(LINE, max_ratio=2.0)
    assert run.ratio(run.engines[0]) == pytest.approx(1e-7 / (70_272 / 1.6e12))
    assert run.faults() == ["a: a token of context costs 2.3 times the card's floor, more than 2"]
    assert "5.00 ms and 0.100 ms a thousand tokens" in run.words()
    assert "an effective 702.7 GB/s" in run.words()
    assert run_of(LINE, max_ratio=3.0).faults() == []


def test_what_fails() -> None:
    assert run_of(LINE, LINE).faults() == []
    slower = run_of([*LINE[:2], 1.2 * LINE[2]], LINE)
    assert "a is 1.20 times as slow as b at 64k" in slower.faults()
    assert run_of(LINE, [*LINE[:2], 1.2 * LINE[2]]).faults() == []
    off = run_of([0.005, 0.1, 0.006])
    assert any("16k is" in fault and "off the line" in fault for fault in off.faults())
    alone = run_of(LINE)
    alone.engines[0].cells = alone.engines[0].cells[:1]
    assert "fewer than two contexts" in alone.faults()[0]
    assert alone.words().startswith("a: 5.10 ms a step at 1k, and no line through one context.")
    assert alone.document()["passed"] is False


def test_what_was_not_measured_is_never_a_pass() -> None:
    run = run_of(LINE)
    assert run.document()["passed"] is True
    run.engines[0].cells[2].why = "status 400: too long"
    assert run.faults() == ["a 64k: status 400: too long"]
    assert run.document()["passed"] is False
    unknown = run_of(LINE, max_ratio=3.0)
    unknown.engines[0].token_bytes = None
    assert (
        "the ratio is not known, for the engine's metrics tell no KV bytes" in unknown.faults()[0]
    )
    assert "No floor of it: the engine's metrics tell no KV bytes" in unknown.words()


def test_steps_that_do_not_grow_are_told_so_and_held_to_the_floor() -> None:
    """As measured of 61 layers on an H200, a sample each: the shortest context came first."""
    run = run_of([6.30e-3, 5.47e-3])
    assert run.faults() == []
    assert run.words() == (
        "a: 6.30 ms a step at 1k and 5.47 at 16k: steps do not grow with the context, so that no "
        "bandwidth can be told; longer --contexts or more --repeats may show it. At 16k reading "
        "the KV takes 0.72 ms of the step at the card's peak: what is not attention decides."
    )
    assert run.table()[2][1:5] == ["16k", "5.47", "5.47", "0.72"]
    first, second = run.document()["engines"][0]["cells"]
    assert first["floor"] == pytest.approx(1024 * 70_272 / 1.6e12)
    assert second["floor"] == pytest.approx(16_384 * 70_272 / 1.6e12)


def test_two_engines_side_by_side(tmp_path: Path) -> None:
    path, page = tmp_path / "step.json", tmp_path / "step.html"
    small = ("--context-length", "2048")
    with (
        running_engine(*small) as drafting,
        running_engine(*small, "--speculative-algorithm", "none") as plain,
    ):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "longleaf", "probe", "step", "--url", drafting.url),
                *("--against", plain.url, "--contexts", "160,1k,4k", "--repeats", "2"),
                *("--max-tokens", "32", "--peak-bytes-per-second", "1e10"),
                *("--json", str(path), "--html", str(page)),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    assert path.exists(), done.stderr
    found = json.loads(path.read_text())
    assert done.returncode == 1
    assert found["passed"] is False
    assert f"{drafting.url} 4k: longer than the server's 2048 tokens" in done.stdout
    first, second = found["engines"]
    row = 4 * 576 * 4  # layers, latent row, float32
    for engine, tokens in ((first, 7.75), (second, 1.0)):
        short, middle, refused = engine["cells"]
        assert len(short["samples"]) == len(middle["samples"]) == 2
        assert all(seconds > 0 for seconds in middle["samples"])
        assert middle["tokens_per_step"] == pytest.approx([tokens, tokens], rel=0.05)
        assert refused["samples"] == []
        # A verify reads the tree's rows too.
        assert row <= engine["kv_bytes_per_token"] <= 1.2 * row
    assert re.search(r"(src|href)=", page.read_text()) is None
    assert "ms a thousand tokens of context" in done.stdout


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    with running_engine("--context-length", "2048") as engine:
        code, out = interrupted(
            *(3, "probe", "step", "--url", engine.url, "--contexts", "160,1k"),
            *("--repeats", "500", "--max-tokens", "16", "--json", str(path)),
        )
    found = json.loads(path.read_text())
    assert code == 130
    assert out.rstrip().endswith("Interrupted.")
    assert (found["partial"], found["passed"]) == (True, False)
    first, second = found["engines"][0]["cells"]
    assert 3 <= len(first["samples"]) < 500
    assert second["samples"] == []
