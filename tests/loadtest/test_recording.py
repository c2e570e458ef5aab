"""What is recorded of a simulated engine is what it was simulated from."""

import json
from pathlib import Path

import pytest

from longleaf.simulate.commits import load_commits
from longleaf.simulate.curve import load_curve
from longleaf_load.__main__ import main
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
    commits, given = load_commits(tmp_path / "again-commit_len.json"), load_commits()
    assert commits.kinds == given.kinds
    for kind in given.kinds:
        assert commits.mean(kind) == pytest.approx(given.mean(kind), rel=0.25)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--contexts", "300k"], "answered 400"),
        (["--contexts", "9k", "--batches", "1"], "does not fit the engine's pool of 9000"),
    ],
)
def test_what_an_engine_cannot_do_is_told(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = ("--max-total-tokens", "9000") if "9k" in words else ("--max-total-tokens", "400000")
    with simulated("--speed", "100", *pool) as engine, pytest.raises(SystemExit) as ended:
        main(["--record-curve", "x", "--url", engine.urls[0], "--out", str(tmp_path), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
