"""The commit probe against engines with a fault planted in each, as a user runs it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from longleaf.probes.baseline import Baseline, expected_of
from longleaf.probes.commit import CommitPlan, CommitRun
from longleaf.probes.judge import Cell
from longleaf.probes.lengths import Contexts, label, usual
from longleaf.probes.texts import TEXTS
from tests.probes.faulty_engine import FAULTS
from tests.probes.interrupt import interrupted
from tests.serve.test_serve import free_ports

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0


@contextlib.contextmanager
def engine_with(fault: str) -> Iterator[str]:
    """An engine with that fault, once it is healthy; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = os.pathsep.join((str(ROOT), str(ROOT / "service")))
    command = [sys.executable, "-m", "tests.probes.faulty_engine", fault, "embedded"]
    with subprocess.Popen(
        [*command, "--port", str(port), "--context-length", "2048"],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except OSError:
        return False


def probe(url: str, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "longleaf", "probe", "commit", "--url", url, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def probed(url: str, folder: Path, *options: str) -> tuple[int, str, Any]:
    """Exit code, standard output and JSON of a run."""
    path = folder / "commit.json"
    run = probe(url, "--json", str(path), *options)
    out, err = run.communicate(timeout=240)
    assert path.exists(), err
    return run.returncode, out, json.loads(path.read_text())


SMALL = ("--contexts", "160,1k", "--texts", "predictable,prose", "--repeats", "1")


@pytest.mark.parametrize(
    ("fault", "verdicts", "cause"),
    [
        ("ignore_window", {"context", "both"}, "window ignored"),
        ("shift_positions", {"context", "both"}, "draft positions"),
        ("drop_draft_kv", {"engine"}, "draft KV missing"),
        ("commit_one", {"engine"}, "accept commits one"),
        ("count_depth_wrong", {"metrics"}, "metrics count wrong"),
        ("count_nothing", {"metrics"}, "metrics miss steps"),
        ("count_steps_twice", {"metrics"}, "metrics count wrong"),
    ],
)
def test_each_planted_fault_is_named(
    fault: str, verdicts: set[str], cause: str, tmp_path: Path
) -> None:
    with engine_with(fault) as url:
        code, out, found = probed(url, tmp_path, *SMALL, "--max-tokens", "32")
    assert found["verdict"] in verdicts
    assert found["cause"] == cause
    assert not found["passed"]
    assert code == 1
    assert f"({cause})" in out.splitlines()[-1]


def test_every_fault_has_its_case() -> None:
    case = test_each_planted_fault_is_named.pytestmark[0]  # type: ignore[attr-defined]
    assert {fault for fault, *_ in case.args[1]} == set(FAULTS) - {"none"}


def test_of_a_sound_engine_the_text_decides(tmp_path: Path) -> None:
    page, textfile = tmp_path / "commit.html", tmp_path / "commit.prom"
    options = ("--texts", "prose,predictable", "--max-tokens", "32")
    outputs = ("--html", str(page), "--textfile", str(textfile))
    with engine_with("none") as url:
        two = ("--contexts", "160,1k", "--repeats", "2")
        code, out, found = probed(url, tmp_path, *options, *two, *outputs)
        assert code == 0, out
        assert (found["verdict"], found["cause"], found["partial"]) == ("text", "", False)
        cells = {(cell["text"], cell["context"]): cell for cell in found["cells"]}
        assert len(cells["predictable", 1024]["samples"]) == 2
        assert cells["predictable", 1024]["mean"] > 6
        assert cells["prose", 1024]["mean"] < 0.7 * cells["predictable", 1024]["mean"]
        for cell in cells.values():
            count = sum(cell["prompt_tokens"]) / 2
            assert count == pytest.approx(cell["context"], rel=0.2)
        text = page.read_text()
        assert text.count("<polyline") == 2
        assert re.search(r"(src|href)=", text) is None
        exposed = textfile.read_text()
        assert 'longleaf_probe_passed{probe="commit",verdict="text"} 1.0' in exposed
        assert 'longleaf_probe_commit_len_expected{context_bucket="1k",text="prose"}' in exposed
        assert 'longleaf_probe_max_age_seconds{probe="commit"} 172800.0' in exposed

        long = ("--contexts", "160,4k", "--repeats", "1")
        code, out, found = probed(url, tmp_path, *options, *long)
        assert (code, found["verdict"], found["passed"]) == (1, "unknown", False)
        why = "longer than the server's 2048 tokens, answer included"
        assert [cell["why"] for cell in found["cells"]] == ["", why] * 2
        assert "prose 4k: longer than the server's" in out.splitlines()[-1]

        usual = ("--texts", "predictable", "--repeats", "1", "--max-tokens", "16")
        code, out, found = probed(url, tmp_path, *usual)
        assert (code, [cell["context"] for cell in found["cells"]]) == (0, [1024])
        assert "One context only" in out

        kept = tmp_path / "partial.json"
        code, out = interrupted(
            *(3, "probe", "commit", "--url", url, "--json", str(kept)),
            *("--contexts", "160", "--repeats", "500"),
        )
        assert code == 130
        assert "Interrupted." in out
        partial = json.loads(kept.read_text())
        assert partial["partial"]
        assert sum(len(cell["samples"]) for cell in partial["cells"]) >= 3


def test_texts_are_as_long_as_asked_and_differ_by_seed() -> None:
    for text in TEXTS.values():
        assert 3000 <= len(text(3000, 0)) < 3020
        assert text(3000, 0) == text(3000, 0) != text(3000, 1)
    assert len(TEXTS["prose"](2_000_000, 3)) == 2_000_000


def test_contexts_are_read_as_people_write_them() -> None:
    assert Contexts().convert("16k, 512,1k", None, None) == (512, 1024, 16_384)
    assert Contexts().convert("200k", None, None) == (200_000,)
    assert [label(tokens) for tokens in (160, 16_384, 200_000)] == ["160", "16k", "200k"]
    with pytest.raises(Exception, match="'x' is no length"):
        Contexts().convert("1k,x", None, None)


def test_the_usual_contexts_are_those_that_the_server_takes() -> None:
    assert usual(None) == usual(1 << 20) == (1024, 16_384, 65_536)
    assert usual(65_536) == (1024, 16_384, 65_536)
    assert usual(65_472) == (1024, 16_384, 32_768)
    assert usual(8128) == (1024, 4096)
    assert usual(1000) == (512,)


@pytest.mark.parametrize("length", ["0", "16385k", "99999999999", "²", "-1", ""])
def test_a_length_beyond_reason_is_refused(length: str) -> None:
    with pytest.raises(click.BadParameter):
        Contexts().convert(f"1k,{length}", None, None)


def test_contexts_of_one_bucket_do_not_hide_one_another(tmp_path: Path) -> None:
    values = ((512, 7.9), (768, 2.0), (1024, 7.8))
    cells = [Cell("predictable", context, [mean], [context]) for context, mean in values]
    path = tmp_path / "probe.prom"
    CommitRun(CommitPlan("u", "m", None), cells).write_textfile(path, {})
    text = path.read_text()
    assert 'longleaf_probe_commit_len{context_bucket="1k",text="predictable"} 2.0' in text
    assert 'expected{context_bucket="1k",text="predictable"} 7.9' in text


@pytest.mark.parametrize("text", ["[1]", "null", '{"cells": []}', "nothing", '{"cells": [{}]}'])
def test_a_baseline_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(click.BadParameter, match="is no JSON of a commit probe"):
        Baseline().convert(str(path), None, None)


def test_a_baseline_says_what_is_expected(tmp_path: Path) -> None:
    measured = [
        Cell("predictable", context, [mean], [context])
        for context, mean in ((1024, 7.9), (16_384, 7.8), (65_536, 3.0))
    ]
    run = CommitRun(CommitPlan("u", "m", (1024,)), measured)
    path = tmp_path / "probe.prom"
    run.write_textfile(path, expected_of(run.document()) | {("predictable", 65_536): 7.4})
    assert (
        'longleaf_probe_commit_len_expected{context_bucket="64k",text="predictable"} 7.4'
        in path.read_text()
    )
    run.write_textfile(path, {})
    assert 'expected{context_bucket="64k",text="predictable"} 7.9' in path.read_text()


class Watch:
    """A ``probe watch`` that runs, and what it publishes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()

    def until(self, condition: Callable[[str], object]) -> str:
        """What it publishes, once ``condition`` holds of it."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with urllib.request.urlopen(self.url, timeout=10) as answer:
                text = str(answer.read().decode())
            if condition(text):
                return text
            assert time.monotonic() < deadline, text
            time.sleep(0.1)


@contextlib.contextmanager
def watching(url: str, *options: str, **environment: str) -> Iterator[Watch]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "longleaf", "probe", "watch", "--url", url, "--every", "0.5"]
    small = ("--contexts", "160", "--max-tokens", "16", "--repeats", "1", "--port", str(port))
    with subprocess.Popen(
        [*command, *small, *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield Watch(process)
        finally:
            process.kill()


def test_a_watch_publishes_each_run_and_forgets_the_one_before() -> None:
    passed = 'longleaf_probe_passed{probe="commit",verdict="text"} 1.0'
    with contextlib.ExitStack() as service:
        url = service.enter_context(engine_with("none"))
        with watching(url) as watch:
            found = watch.until(lambda text: passed in text)
            assert 'longleaf_probe_commit_len{context_bucket="1k",text="predictable"}' in found
            (when,) = re.findall(r"^longleaf_probe_timestamp_seconds\S* (\S+)$", found, re.M)
            watch.until(lambda text: passed in text and when not in text)
            service.close()  # the engine is gone: nothing is known any more
            found = watch.until(lambda text: 'verdict="unknown"} 0.0' in text)
            assert passed not in found
            assert "longleaf_probe_commit_len{" not in found
            watch.process.terminate()
            assert watch.process.wait(timeout=30) == 0


def test_a_watch_waits_for_a_server_that_starts_and_shows_it_the_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-secret\n")
    ports = [str(port) for port in free_ports(3)]
    url = f"http://127.0.0.1:{ports[0]}"
    command = [
        *(sys.executable, "-m", "longleaf", "serve", "--port", ports[0]),
        *("--metrics-port", ports[1], "--engine-port", ports[2], "--api-key-file", str(keys)),
    ]
    waits = ("--start-seconds", str(START_SECONDS))
    with watching(url, *waits, LONGLEAF_PROBE_API_KEY="a-secret") as watch:
        found = watch.until(lambda text: "longleaf_probe_max_age_seconds" in text)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                found = watch.until(lambda text: "longleaf_probe_passed{" in text)
                assert 'longleaf_probe_passed{probe="commit",verdict="text"} 1.0' in found
                age = 2 * 0.5 + START_SECONDS + 1800
                assert f'longleaf_probe_max_age_seconds{{probe="commit"}} {age}' in found
                run = probe(url, *SMALL, "--api-key", "another")
                assert "status 401: give the key (--api-key)" in run.communicate(timeout=60)[1]
                assert run.returncode == 1
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(timeout=90)


def test_a_watch_that_waited_in_vain_says_so() -> None:
    with watching("http://127.0.0.1:1", "--start-seconds", "0.2") as watch:
        found = watch.until(lambda text: "longleaf_probe_passed{" in text)
        assert 'longleaf_probe_passed{probe="commit",verdict="unknown"} 0.0' in found
