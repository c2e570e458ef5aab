"""Which of a run's workers are lost."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import IO, Any

import pytest

from longleaf_load.records import read_records
from longleaf_load.workers import Workers
from tests.loadtest.serving import served
from tests.loadtest.test_close import ANSWER, ENV, LOCUST, load_command
from tests.loadtest.test_run import free_port

PLAN = """
[[phase]]
seconds = 40
rate = 8.0
[prompts]
length = 100
longest = "1k"
"""


def begun() -> Workers:
    workers = Workers()
    workers.begin(["a", "b"])
    return workers


def test_one_that_is_given_up_is_lost_and_the_run_ends_with_the_others() -> None:
    workers = begun()
    assert workers.look(["a", "b"]) == set()
    assert workers.look(["a"]) == set(), "it may register anew"
    assert workers.look(["a"]) == {"b"}
    assert workers.look(["a"]) == set(), "it is told once"
    assert not workers.over(2)
    workers.hear("a", finished=True)
    assert workers.over(2)
    assert workers.lost == {"b"}
    assert "a" in workers
    assert "c" not in workers, "another run's"


def test_one_that_comes_back_is_no_loss() -> None:
    workers = begun()
    for present in (["a"], ["a", "b"], ["a"], ["a", "b"]):
        assert workers.look(present) == set()
    workers.look(["a"])
    workers.hear("b", finished=False)
    assert workers.look(["a"]) == set()
    assert workers.look(["a"]) == {"b"}
    workers.hear("b", finished=False)
    assert workers.lost == set()
    workers.hear("b", finished=True)
    workers.hear("a", finished=True)
    assert workers.over(2)


def test_one_that_has_finished_may_go() -> None:
    workers = begun()
    workers.hear("b", finished=True)
    for _ in range(3):
        assert workers.look(["a"]) == set()
    assert not workers.over(2)


def read_until(left: int, lines: IO[str]) -> str:
    """What a run says until it has at most ``left`` seconds left."""
    said = ""
    for line in lines:
        said += line
        found = re.search(r"(\d+) s left, phase 8/s: .* ok", line)
        if found and int(found[1]) <= left:
            return said
    raise AssertionError(said)


@pytest.mark.skipif(not LOCUST.exists(), reason="needs Locust: make .venv-loadtest/.ready")
def test_one_worker_ends_and_the_other_is_late(tmp_path: Path) -> None:
    """The first is lost; the second, who was not heard of for a while, is not."""
    address = f"127.0.0.1:{free_port()}"
    with served([(0.0, ANSWER)]) as url:
        command = load_command(tmp_path, url, 2, PLAN)
        master: subprocess.Popen[Any] = subprocess.Popen(
            [*command, "--listen", address], env=ENV, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        joined: list[subprocess.Popen[Any]] = [
            subprocess.Popen([*command, "--join", address], env=ENV, stderr=subprocess.DEVNULL)
            for _ in range(2)
        ]
        try:
            assert master.stdout is not None
            said = read_until(35, master.stdout)
            joined[0].terminate()
            said += read_until(17, master.stdout)
            assert said.count("is lost") == 1, "it is told at once, not at the end"
            joined[1].send_signal(signal.SIGSTOP)
            said += read_until(7, master.stdout)
            joined[1].send_signal(signal.SIGCONT)
            said += master.stdout.read()
            assert master.wait() == 3, said
            assert joined[1].wait() == 0
        finally:
            for process in (master, *joined):
                process.kill()
                process.communicate()
    assert said.count("is lost") == 1, said
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["workers_lost"] == 1
    assert report["stopped_after_seconds"] is None
    (told,) = (one for one in report["cautions"] if "lost" in one)
    assert told.startswith("1 of 2 workers lost: their share of the arrivals was not sent")
    assert f"CAUTION: {told}" in said
    records = list(read_records(tmp_path / "out" / "records.jsonl"))
    late = {one.arrival % 2 for one in records if one.sent > 20}
    assert len(late) == 1, "the other's share"
    assert max(one.sent for one in records) > 38
