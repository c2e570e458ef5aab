"""The end of a run: what is written, whatever gets in its way."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf_load.interrupts import interrupt_once, uninterrupted
from longleaf_load.plan import parse_plan
from longleaf_load.prompts import PromptSource
from longleaf_load.records import read_records
from longleaf_load.run import Run
from longleaf_load.simulation import Lag, label
from longleaf_load.slo import Slo
from tests.loadtest.serving import DONE, Piece, blank, event, head, served
from tests.simulate.conftest import simulated

ROOT = Path(__file__).resolve().parents[2]
LOCUST = ROOT / ".venv-loadtest" / "bin" / "python"
ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'loadtest'}{os.pathsep}{ROOT / 'service'}"}
PHASE = {"seconds": 10, "rate": 1.0}
ANSWER = head() + event("a") + event("b") + b'data: {"usage": {"completion_tokens": 4}}\n\n' + DONE


def run_of(out: Path, url: str = "http://127.0.0.1:1", **values: Any) -> Run:
    plan = parse_plan({"phase": [PHASE] * 3, "prompts": {"length": 100}, **values}, out)
    return Run(
        plan=plan, source=PromptSource(DEFAULT_MODELS / "tiny-target", 500, seed=1), slo=Slo(),
        url=url, model="longleaf-simulated", key=None, workers=1, out=out, plan_name="p",
    )  # fmt: skip


def ended(run: Run, **values: Any) -> tuple[int, dict[str, Any]]:
    run.add(blank(**{"outcome": "ok", "ttft": 0.1, **values}))
    run.done = True
    return run.close(), json.loads((run.out / "report.json").read_text())


def test_a_simulated_run_is_labelled_and_asks_whether_its_replicas_kept_up(tmp_path: Path) -> None:
    with simulated("--speed", "50") as engine:
        (url,) = engine.urls
        told = label(url, "chat", "longleaf-simulated", None)
        assert told == "simulated:h200-ddtree:x50"
        _, report = ended(run_of(tmp_path), fingerprint=told, replica=url)
    assert report["simulation_lost_seconds"] >= 0
    assert "simulated (simulated:h200-ddtree:x50)" in (tmp_path / "SIMULATED.txt").read_text()
    _, report = ended(run_of(tmp_path), fingerprint="fp_1")
    assert report["simulated"] == []
    assert not (tmp_path / "SIMULATED.txt").exists(), "an earlier run's label"


class Losing(list[Piece]):
    """Metrics of a replica that has lost the next of ``seconds`` each time that it is asked."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = iter(seconds)

    def __iter__(self) -> Iterator[Piece]:
        line = b'longleaf_simulation_lost_seconds{simulated="c"} %f\n'
        return iter([(0.0, head() + line % next(self._seconds))])


def test_what_the_worst_of_the_replicas_lost_during_the_run_counts(tmp_path: Path) -> None:
    with (
        served(Losing(0.5, 3.0)) as one,
        served(Losing(7.25, 7.75)) as other,
        served([(0.0, head() + b"other 3\n")]) as untold,
    ):
        run = run_of(tmp_path)
        for replica in (one, other, one, untold, "http://127.0.0.1:1"):
            run.add(blank(outcome="ok", replica=replica, fingerprint="simulated:c:x1"))
        _, report = ended(run)
        lag = Lag()
        lag.see(untold)
        assert lag.seconds() is None
    assert report["simulation_lost_seconds"] == 2.5
    assert Lag().seconds() is None


def test_an_engine_without_a_gateway_is_asked_when_the_run_begins(tmp_path: Path) -> None:
    with served(Losing(4.0, 4.5)) as url:
        run = run_of(tmp_path, url)
        run.begin()
        _, report = ended(run, fingerprint="simulated:c:x1")
    assert report["simulation_lost_seconds"] == 0.5


def test_a_run_that_was_only_refused_is_labelled_too(tmp_path: Path) -> None:
    with simulated("--speed", "50") as engine:
        run = run_of(tmp_path, engine.urls[0])
        _, report = ended(run, outcome="refused", status=429, reason="full")
    assert report["simulated"] == ["simulated:h200-ddtree:x50"]
    assert report["requests"] == 1


def test_a_run_that_ended_early_has_the_time_of_the_phases_that_began(tmp_path: Path) -> None:
    _, report = ended(run_of(tmp_path, stop_below=0.5), phase=1)
    assert [one["seconds"] for one in report["phases"]] == [10, 10, 0]
    _, report = ended(run_of(tmp_path), phase=1)
    assert [one["seconds"] for one in report["phases"]] == [10, 10, 10]
    run = run_of(tmp_path)
    run.begin()
    assert run.close() == 3
    report = json.loads((tmp_path / "report.json").read_text())
    assert 0 < report["phases"][0]["seconds"] < 10
    assert report["phases"][1]["seconds"] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_loses_what_it_must_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text("an earlier run's")
    (tmp_path / "report.json.part").symlink_to("/dev/full")
    run = run_of(tmp_path)
    run.add(blank(outcome="ok", ttft=0.1))
    run.done = True
    assert run.close() == 2
    assert [one.outcome for one in read_records(tmp_path / "records.jsonl")] == ["ok"]
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "report.json").exists()
    said = capsys.readouterr().err
    assert f"error: {tmp_path}/report.json could not be written: No space left on device\n" in said
    assert "100.0% met the objective" in said


def test_the_commonest_reasons_are_among_the_last_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    for reason, count in (("a", 1), ("full", 4), ("b", 2), ("c", 3), ("d", 1)):
        for _ in range(count):
            run.add(blank(outcome="refused", status=400, reason=reason))
    ended(run, outcome="failed", reason="broke off")
    said = capsys.readouterr().err
    assert "\nrefused: 4 full, 3 c, 2 b, 2 others; failed: 1 broke off\n" in said
    ended(run_of(tmp_path))
    assert "refused:" not in capsys.readouterr().err


def test_a_folder_that_cannot_be_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    run = run_of(tmp_path)
    run.out = tmp_path / "file"
    assert run.close() == 2
    assert "records.jsonl could not be written: " in capsys.readouterr().err


@pytest.fixture
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("restored")
def test_one_interrupt_counts() -> None:
    interrupt_once()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("restored")
def test_nothing_interrupts_a_report() -> None:
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("restored")
def test_a_process_that_ignores_interrupts_goes_on_doing_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt_once()
    signal.raise_signal(signal.SIGINT)


def load_command(folder: Path, url: str, workers: int, plan: str) -> list[str]:
    (folder / "plan.toml").write_text(plan)
    command = [str(LOCUST), "-m", "longleaf_load", "--url", url, "--workers", str(workers)]
    command += ["--model-name", "m", "--plan", str(folder / "plan.toml")]
    return [*command, "--out", str(folder / "out")]


@pytest.mark.skipif(not LOCUST.exists(), reason="needs Locust: make .venv-loadtest/.ready")
@pytest.mark.parametrize("workers", [1, 3])
def test_impatience_loses_nothing(tmp_path: Path, workers: int) -> None:
    plan = '[[phase]]\nseconds = 400\nrate = 30.0\n[prompts]\nlength = 100\nlongest = "1k"'
    said = ""
    with (
        served([(0.0, ANSWER)]) as url,
        subprocess.Popen(
            load_command(tmp_path, url, workers, plan), env=ENV, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True, text=True,
        ) as run,
    ):  # fmt: skip
        assert run.stdout is not None
        for line in run.stdout:
            said += line
            if " ok" in line:
                break
        while run.poll() is None:
            os.killpg(run.pid, signal.SIGINT)
            time.sleep(0.01)
        said += run.stdout.read()
        assert run.returncode == 3, said
        assert "Traceback" not in said
        assert "KeyboardInterrupt" not in said
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    records = list(read_records(tmp_path / "out" / "records.jsonl"))
    assert report["requests"] == len(records) > 0
    assert report["phases"][0]["seconds"] == report["stopped_after_seconds"] > 0


@pytest.mark.skipif(not LOCUST.exists(), reason="needs Locust: make .venv-loadtest/.ready")
def test_a_second_sigterm_waits_for_the_report(tmp_path: Path) -> None:
    plan = '[[phase]]\nseconds = 400\nrate = 30.0\n[prompts]\nlength = 100\nlongest = "1k"'
    lost = b"longleaf_simulation_lost_seconds 1.5\n"
    with served([(1.5, head() + lost)]) as slow:
        told = b'data: {"system_fingerprint": "simulated:c:x1", "longleaf": {"replica": "%s"}}\n\n'
        answer = head() + event("a") + told % slow.encode() + DONE
        with (
            served([(0.0, answer)]) as url,
            subprocess.Popen(
                load_command(tmp_path, url, 1, plan), env=ENV, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            ) as run,
        ):  # fmt: skip
            assert run.stdout is not None
            next(line for line in run.stdout if " ok" in line)
            run.send_signal(signal.SIGTERM)
            while not (tmp_path / "out" / "records.jsonl").exists() and run.poll() is None:
                time.sleep(0.01)
            run.send_signal(signal.SIGTERM)  # while it asks the replica
            said = run.stdout.read()
            assert run.wait() == 3, said
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["simulation_lost_seconds"] == 0.0
    assert report["outcomes"]["ok"] > 0


@pytest.mark.skipif(not LOCUST.exists(), reason="needs Locust: make .venv-loadtest/.ready")
def test_how_late_each_request_was_sent_is_recorded(tmp_path: Path) -> None:
    plan = '[[phase]]\nseconds = 1\nrate = 20.0\nburst = 0\n[prompts]\nlength = 100\nlongest = "1k"'
    with served([(0.0, ANSWER)]) as url:
        done = subprocess.run(
            load_command(tmp_path, url, 1, plan),
            env=ENV,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    records = list(read_records(tmp_path / "out" / "records.jsonl"))
    assert len(records) == 19
    for record in records:
        planned = (record.arrival + 1) / 20
        assert record.late > 0
        assert record.sent - record.late == pytest.approx(planned, abs=1e-5)
