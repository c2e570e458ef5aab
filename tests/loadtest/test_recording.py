"""What is recorded of a simulated engine is what it was simulated from."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from longleaf.simulate.commits import load_commits
from longleaf.simulate.curve import load_curve
from longleaf_load.__main__ import main
from longleaf_load.prompts import KINDS, PromptSource
from longleaf_load.recording import Recorder
from tests.simulate.conftest import simulated

STEP, PREFILL = 0.02, 0.0001
CURVE = {
    "name": "even",
    "nodes": 9,
    "kv_bytes_per_token": 70_272,
    "steps": [
        {"context": context, "batch": batch, "seconds": batch * STEP}
        for batch in (1, 2)
        for context in (100, 1_000)
    ],
    "prefill": [{"context": 1_000, "cached": 0, "seconds": 1_000 * PREFILL},
                {"context": 100, "cached": 0, "seconds": 100 * PREFILL}],
}  # fmt: skip


def test_a_recorded_curve_is_the_engines(tmp_path: Path) -> None:
    (tmp_path / "even.json").write_text(json.dumps(CURVE))
    with simulated("--curve", str(tmp_path / "even.json")) as engine:
        words = ["--record-curve", "again", "--contexts", "200,800", "--batches", "1,2"]
        words += ["--answers", "uniform 40 60", "--out", str(tmp_path), "--url", engine.urls[0]]
        assert main(words) == 0
    curve = load_curve(str(tmp_path / "again.json"))
    assert curve.nodes == 9
    assert curve.kv_bytes_per_token == pytest.approx(70_272, rel=0.01)
    for context in (200, 800):
        # The chat template's first tokens are cached from the request before.
        assert curve.prompt_seconds(context) == pytest.approx((context - 4) * PREFILL, rel=0.01)
        for batch in (1, 2):  # a busy machine makes steps longer, nothing makes them shorter
            assert curve.step_seconds([context] * batch) > 0.95 * batch * STEP
    for name in ("again", "again-commit_len"):  # of whatever a curve is recorded, it says so
        about = json.loads((tmp_path / f"{name}.json").read_text())
        assert about["simulated"] == "simulated:even:x1"
        assert about["engine"]["device"] == "cpu"
        assert about["machine"].endswith(", Linux")
    commits, given = load_commits(tmp_path / "again-commit_len.json"), load_commits()
    assert commits.kinds == given.kinds
    for kind in given.kinds:
        assert commits.mean(kind) == pytest.approx(given.mean(kind), rel=0.25)


@pytest.mark.parametrize(
    ("words", "least", "most"),
    [
        ((), 200, 300),
        (("--prompts", "100"), 100, 100),
        (("--prompts", "lognormal 2k 0"), 2048, 2048),
    ],
)
def test_commit_len_is_of_prompts_as_long_as_the_traffics(
    words: Sequence[str],
    least: int,
    most: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []
    text = PromptSource.text

    def noted(source: PromptSource, kind: str, length: int, random_: random.Random) -> str:
        asked.append((kind, length))
        return text(source, kind, length, random_)

    monkeypatch.setattr(PromptSource, "text", noted)
    with simulated("--speed", "100") as engine:
        given = ["--record-curve", "x", "--contexts", "200,300", "--batches", "1", *words]
        assert (
            main([*given, "--answers", "8", "--url", engine.urls[0], "--out", str(tmp_path)]) == 0
        )
    assert [kind for kind, _ in asked[:36]] == [kind for kind in KINDS for _ in range(12)]
    lengths = [length for _, length in asked[:36]]
    assert least <= min(lengths) <= least + 20
    assert most - 20 <= max(lengths) <= most
    assert len(set(lengths)) == (1 if least == most else 12)


@pytest.mark.parametrize(
    ("limits", "words", "message"),
    [
        (("--max-total-tokens", "400000"), ("--contexts", "300k"), "answered 400"),
        (
            ("--max-total-tokens", "9000"),
            ("--contexts", "1k,9k"),
            "--contexts: 1 x 9216 tokens and answers of 160 do not fit the engine's pool of 9000",
        ),
        (
            ("--max-total-tokens", "90000", "--max-running-requests", "64"),
            ("--contexts", "8k", "--batches", "1,64"),
            "--batches: 64 x 8192 tokens and answers of 160 do not fit the engine's pool of 90000",
        ),
        (
            ("--max-running-requests", "2"),
            ("--contexts", "1k", "--batches", "1,8"),
            "--batches: the engine runs at most 2 requests at once, got 8",
        ),
        ((), ("--contexts", ""), "--contexts: '' is no number of tokens"),
        ((), ("--prompts", ""), "--prompts: '' is no number of tokens"),
        ((), ("--answers", ""), "--answers: '' is no number of tokens"),
    ],
)
def test_what_an_engine_cannot_do_is_told(
    limits: Sequence[str],
    words: Sequence[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--record-curve", "x", "--batches", "1", *words, "--out", str(tmp_path)]
    with simulated("--speed", "100", *limits) as engine, pytest.raises(SystemExit) as ended:
        main([*given, "--url", engine.urls[0]])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_answers_that_did_not_decode_together_are_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "_info", lambda _: {})  # one that does not tell its limit
    with simulated("--speed", "10", "--max-running-requests", "2") as engine:
        words = ["--record-curve", "x", "--contexts", "300", "--batches", "4"]
        with pytest.raises(SystemExit) as ended:
            main([*words, "--url", engine.urls[0], "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "4 answers after 300 tokens did not decode together" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_machine_of_an_engine_is_told_and_not_taken_from_its_client(tmp_path: Path) -> None:
    (tmp_path / "even.json").write_text(json.dumps(CURVE))
    with simulated("--curve", str(tmp_path / "even.json"), "--speed", "20") as engine:
        words = ["--record-curve", "again", "--contexts", "100", "--batches", "1"]
        words += ["--machine", "8 x H200", "--out", str(tmp_path), "--url", engine.urls[0]]
        assert main([*words, "--answers", "8"]) == 0
    assert load_curve(str(tmp_path / "again.json")).source["machine"] == "8 x H200"
