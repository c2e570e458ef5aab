"""A probe leaves what it has, however it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from longleaf.metrics import ProbeMetrics
from longleaf.probes import watch
from longleaf.probes.client import ProbeError
from longleaf.probes.command import probe_command
from longleaf.probes.commit import CommitPlan
from longleaf.probes.conduct import Ending, conduct
from tests.gateway.engine import running_engine
from tests.probes.interrupt import interrupted


def longleaf(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "longleaf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_work_and_keeps_what_it_did(number: signal.Signals) -> None:
    done = []

    async def work() -> None:
        done.append("before")
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            done.append("after")

    assert conduct(work()) == Ending(interrupted=True)
    assert done == ["before", "after"]


@pytest.mark.parametrize("error", [ProbeError("gone"), ValueError("a fault of the probe")])
def test_an_error_is_kept_until_the_files_are_written(error: Exception) -> None:
    async def work() -> None:
        raise error

    assert conduct(work()).error is error


def test_a_probe_that_is_ended_writes_its_json(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    with running_engine("--context-length", "2048") as engine:
        code, out = interrupted(
            *(2, "probe", "step", "--url", engine.url, "--contexts", "160", "--json", str(path)),
            *("--repeats", "500", "--max-tokens", "16"),
            by=signal.SIGTERM,
        )
    found = json.loads(path.read_text())
    assert code == 130
    assert out.rstrip().endswith("Interrupted.")
    assert (found["partial"], found["passed"]) == (True, False)
    assert len(found["engines"][0]["cells"][0]["samples"]) >= 2


def refused(*arguments: str) -> str:
    """What a probe says that never asks the server."""
    done = CliRunner().invoke(probe_command, [*arguments, "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 2, done.output
    return done.output


def test_what_will_be_written_is_checked_before_anything_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for probe in ("commit", "step", "gpu"):
        for option in ("--json", "--html"):
            for path in (file / "x.json", tmp_path):
                assert f"Invalid value for '{option}'" in refused(probe, option, str(path))
    for option in ("--textfile", "--baseline"):
        assert f"Invalid value for '{option}'" in refused("commit", option, str(file / "x"))


def test_the_other_engine_is_asked_for_first(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    with running_engine("--context-length", "2048") as engine:
        options = ("--contexts", "160", "--repeats", "100", "--json", str(path))
        done = longleaf(
            *("probe", "step", "--url", engine.url, "--against", "http://127.0.0.1:1", *options)
        )
        named = longleaf(
            *("probe", "commit", "--url", engine.url, "--contexts", "160"),
            *("--metrics-url", f"{engine.url}/health"),
        )
    assert done.returncode == 1
    assert "Error: http://127.0.0.1:1/v1/models" in done.stderr
    assert json.loads(path.read_text())["engines"] == []
    # Metrics that somebody names must be there.
    assert named.returncode == 1
    assert "Error: " in named.stderr
    assert "/health" in named.stderr


def test_a_ratio_needs_a_card() -> None:
    assert "--max-ratio needs --card" in refused("step", "--max-ratio", "2")


@pytest.mark.parametrize("error", [ProbeError("gone"), ZeroDivisionError("a fault of the probe")])
def test_a_watch_publishes_unknown_and_logs_whatever_ended_a_run(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def measure(run: Any, progress: Any) -> None:
        raise error

    registry = CollectorRegistry()
    metrics = ProbeMetrics(registry)
    metrics.passed.labels("commit", "text").set(1)
    monkeypatch.setattr(watch, "measure", measure)
    asyncio.run(watch._once(CommitPlan("u", "m", None), {}, metrics))
    (passed,) = (family for family in registry.collect() if family.name == "longleaf_probe_passed")
    assert [(sample.labels["verdict"], sample.value) for sample in passed.samples] == [
        ("unknown", 0)
    ]
    assert str(error) in caplog.text
    assert ("Traceback" in caplog.text) is isinstance(error, ZeroDivisionError)
