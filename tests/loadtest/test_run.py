"""The whole of it: simulated replicas, a gateway, Locust in the load tests' own environment."""

import csv
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf_load.__main__ import main
from longleaf_load.arrivals import arrivals
from longleaf_load.options import served_model
from longleaf_load.plan import load_plan, parse_plan
from longleaf_load.prompts import PromptSource
from longleaf_load.records import Record, read_records
from longleaf_load.run import Run
from longleaf_load.sessions import Sessions
from longleaf_load.slo import Slo
from longleaf_load.stream import Client
from tests.gateway.running import running_gateway
from tests.simulate.conftest import simulated

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]
LOCUST = ROOT / ".venv-loadtest" / "bin" / "python"
ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'loadtest'}{os.pathsep}{ROOT / 'service'}"}
needs_locust = pytest.mark.skipif(
    not LOCUST.exists(), reason="needs Locust: make test-load brings it"
)
PLAN = """
seed = 3
[[phase]]
name = "steady"
seconds = 3
rate = 6.0
[[phase]]
name = "flood"
seconds = 3
rate = 160.0
[prompts]
length = "log_uniform 100 3k"
longest = "8k"
[answers]
max_tokens = "uniform 8 24"
[documents]
count = 2
length = "2k"
share = 0.2
[turns]
count = 2
think_seconds = 0.1
[cancel]
share = 0.1
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def gateway() -> AsyncIterator[Any]:
    limits = ("--speed", "20", "--max-running-requests", "2")
    tokenizer = str(DEFAULT_MODELS / "tiny-target")
    with simulated(*limits, replicas=2) as engines:
        async with running_gateway(
            *engines.urls, ready=2, tokenizers=(tokenizer,), queue_size=3
        ) as one:
            yield one


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def follow_the_plan(records: Sequence[Record], path: Path) -> None:
    """Each arrival was made once, in its phase, when the plan says and not before."""
    plan = load_plan(path)
    planned = {one.number: one for one in arrivals(plan.phases, plan.seed)}
    first = [one for one in records if (one.turn, one.attempt) == (1, 1)]
    assert sorted(one.arrival for one in first) == sorted(planned)
    for one in first:
        arrival = planned[one.arrival]
        assert one.phase == arrival.phase
        assert one.sent - one.late == pytest.approx(arrival.at, abs=1e-6)
        assert one.late > -0.002, "sleeps may end a moment early"


def load_command(url: str, folder: Path, workers: int) -> list[str]:
    command = [str(LOCUST), "-m", "longleaf_load", "--url", url, "--workers", str(workers)]
    return [*command, "--plan", str(folder / "plan.toml"), "--out", str(folder / "out")]


async def ask(url: str, leave_after: int | None = None, **fields: Any) -> Record:
    import anyio.to_thread

    body = {
        "model": "longleaf-simulated",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 40,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    record = Record(
        arrival=0, phase=0, turn=1, attempt=1, text="code", prompt_tokens=6, max_tokens=40,
        document=None, sent=0.0, late=0.0,
    )  # fmt: skip
    client = Client(url, "chat", 30.0)
    await anyio.to_thread.run_sync(client.ask, body, record, leave_after)
    return record


async def test_one_request_tells_all(gateway: Any) -> None:
    record = await ask(gateway.url, metadata={"text": "code"})
    assert (record.outcome, record.status, record.reason) == ("ok", 200, None)
    assert (record.counted_tokens, record.completion_tokens) == (6, 40)
    assert record.commit_len is not None
    assert record.steps is not None
    assert record.steps * record.commit_len == pytest.approx(39, abs=0.01)
    assert record.fingerprint == "simulated:h200-ddtree:x20"
    assert record.replica is not None
    assert record.replica.startswith("http://127.0.0.1:")
    assert record.ttft is not None
    assert record.prefill_seconds is not None
    assert 0.0 < record.prefill_seconds <= record.ttft
    assert record.answer.startswith("This answer is simulated. ")
    assert record.tpot is not None
    assert record.seconds is not None
    assert record.ttft + 39 * record.tpot <= record.seconds


async def test_clients_that_leave_and_requests_that_are_refused(gateway: Any) -> None:
    assert (await ask(gateway.url, leave_after=2)).outcome == "cancelled"
    assert (await ask(gateway.url, leave_after=0)).reason == "before the first token"
    refused = await ask(gateway.url, max_tokens=10**6)
    assert (refused.outcome, refused.status) == ("refused", 400)
    assert refused.reason == "context_length_exceeded"
    gone = await ask("http://127.0.0.1:9")
    assert (gone.outcome, gone.reason) == ("failed", "ConnectionRefusedError")


@needs_locust
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_plan_from_beginning_to_end(gateway: Any, tmp_path: Path, workers: int) -> None:
    import anyio

    (tmp_path / "plan.toml").write_text(PLAN)
    command = load_command(gateway.url, tmp_path, workers)
    command += ["--slo", "ttft_ms=60000", "share=0.99"]
    done = await anyio.run_process(command, check=False, env=ENV, stderr=subprocess.STDOUT)
    said = done.stdout.decode()
    assert done.returncode == 1, said  # the flood is refused in part: the objective is missed
    assert "s left, phase flood" in said
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    records = list(read_records(tmp_path / "out" / "records.jsonl"))
    assert report["requests"] == len(records) > 100
    seen = {(one.arrival, one.turn, one.attempt) for one in records}
    assert len(seen) == len(records), "each arrival was made once, by one worker"
    follow_the_plan(records, tmp_path / "plan.toml")
    assert {one.outcome for one in records} == {"ok", "refused", "cancelled"}
    assert (report["seed"], report["workers"]) == (3, workers)
    assert report["stopped_after_seconds"] is None
    assert report["exact_prompts"]["wrong"] == 0
    assert report["exact_prompts"]["told"] > 50
    assert report["retry_after"]["without"] == 0
    assert report["simulated"] == ["simulated:h200-ddtree:x20"]
    assert [phase["name"] for phase in report["phases"]] == ["steady", "flood"]
    assert report["phases"][1]["refused"] > report["phases"][0]["refused"]
    assert any(one.turn == 2 for one in records)
    assert any(one.document is not None for one in records)
    with (tmp_path / "out" / "locust_stats.csv").open() as file:
        names = {(row["Type"], row["Name"]) for row in csv.DictReader(file)}
    assert {("TTFT", "1k"), ("TPOT", "4k"), ("chat", "refused 4k")} <= names
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


@needs_locust
async def test_a_run_that_is_stopped_reports_and_fails(gateway: Any, tmp_path: Path) -> None:
    import anyio

    (tmp_path / "plan.toml").write_text(PLAN.replace("seconds = 3", "seconds = 400", 1))
    command = load_command(gateway.url, tmp_path, 2)
    said = ""
    async with await anyio.open_process(
        command, env=ENV, stderr=subprocess.STDOUT, start_new_session=True
    ) as run:
        assert run.stdout is not None
        async for piece in run.stdout:
            said += piece.decode()
            if " ok" in said:
                os.killpg(run.pid, signal.SIGINT)
                break
        async for piece in run.stdout:
            said += piece.decode()
        assert await run.wait() == 3, said
    assert "STOPPED before its end, after" in said
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert 0 < report["stopped_after_seconds"] < 400
    assert report["outcomes"]["ok"] > 0
    assert "STOPPED before its end" in (tmp_path / "out" / "report.html").read_text()


@needs_locust
async def test_workers_from_anywhere_join_a_run(gateway: Any, tmp_path: Path) -> None:
    """As on three machines: each has its own folder, session and copy of the plan."""
    import anyio

    address, said = f"127.0.0.1:{free_port()}", {}
    roles = [("--listen", "master"), ("--join", "one"), ("--join", "two")]

    async def start(option: str, name: str, *more: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "plan.toml").write_text(PLAN.replace("rate = 160.0", "rate = 20.0"))
        command = [*load_command(gateway.url, folder, 2), option, address, *more]
        said[name] = done = await anyio.run_process(
            command,
            check=False, env=ENV, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
        )  # fmt: skip
        if done.returncode:  # the others would wait for it
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for option, name in roles:
            group.start_soon(start, option, name, *(["--slo", "share=0.001"] * (name == "master")))
    for name, done in said.items():
        assert done.returncode == 0, f"{name}: {done.stdout.decode()}"
    out = tmp_path / "master" / "out"
    records = list(read_records(out / "records.jsonl"))
    follow_the_plan(records, tmp_path / "master" / "plan.toml")
    report = json.loads((out / "report.json").read_text())
    assert (report["workers"], report["requests"]) == (2, len(records))
    assert report["outcomes"]["ok"] > 20
    assert not (tmp_path / "one" / "out" / "report.json").exists()


@needs_locust
async def test_a_worker_of_another_plan_is_told(gateway: Any, tmp_path: Path) -> None:
    import anyio

    (tmp_path / "plan.toml").write_text(PLAN)
    address, said = f"127.0.0.1:{free_port()}", {}

    async def start(*words: str) -> None:
        command = [*load_command(gateway.url, tmp_path, 1), *words]
        said[words[0]] = await anyio.run_process(
            command, check=False, env=ENV, stderr=subprocess.STDOUT, start_new_session=True
        )

    async with anyio.create_task_group() as group:
        group.start_soon(start, "--listen", address)
        group.start_soon(start, "--join", address, "--rate", "0.5")
    master = said["--listen"]
    assert master.returncode == 2, master.stdout.decode()
    assert "was told another plan, model, --rate, --longer" in master.stdout.decode()
    assert not (tmp_path / "out" / "report.json").exists()


@needs_locust
async def test_clients_leave_while_they_wait(tmp_path: Path) -> None:
    """After the time that the plan draws, wherever the request is by then."""
    import anyio

    path = tmp_path / "plan.toml"
    path.write_text(
        """
        [[phase]]
        seconds = 1
        rate = 10.0
        [prompts]
        length = "8k"
        longest = "8k"
        [answers]
        max_tokens = 400
        [cancel]
        share = 1.0
        seconds = 0.2
        """
    )
    made = Sessions(load_plan(path), PromptSource(DEFAULT_MODELS / "tiny-target", 8192, 1), "tiny")
    stay = {}
    for arrival in made.arrivals():
        turn = made.turns(arrival).next()
        assert turn is not None
        stay[arrival.number] = turn.leave_seconds
    with simulated() as engine:  # it prefills one prompt after the other
        command = load_command(engine.urls[0], tmp_path, 1)
        done = await anyio.run_process(command, check=False, env=ENV, stderr=subprocess.STDOUT)
    assert done.returncode == 1, done.stdout.decode()
    records = list(read_records(tmp_path / "out" / "records.jsonl"))
    assert {one.outcome for one in records} == {"cancelled"}
    early = [one for one in records if one.reason == "before the first token"]
    assert len(early) > 2
    for one in early:
        seconds = stay[one.arrival]
        assert seconds is not None
        assert one.seconds is not None
        assert one.seconds >= seconds - 0.002
        assert (one.ttft, one.events) == (None, 0)
    assert all(one.events > 1 for one in records if stay[one.arrival] is None)


@needs_locust
async def test_refused_clients_come_back_when_they_are_told_to(
    gateway: Any, tmp_path: Path
) -> None:
    import anyio

    plan = """
    retries = 1
    [[phase]]
    seconds = 1
    rate = 100.0
    [prompts]
    length = "2k"
    longest = "8k"
    [answers]
    max_tokens = 16
    """
    (tmp_path / "plan.toml").write_text(plan)
    command = load_command(gateway.url, tmp_path, 1)
    done = await anyio.run_process(command, check=False, env=ENV, stderr=subprocess.STDOUT)
    assert done.returncode in {0, 1}, done.stdout.decode()
    records = list(read_records(tmp_path / "out" / "records.jsonl"))
    first = {one.arrival: one for one in records if one.attempt == 1}
    again = [one for one in records if one.attempt == 2]
    refused = {one.arrival for one in first.values() if one.outcome == "refused"}
    assert refused
    assert {one.arrival for one in again} == refused
    for one in again:
        told = first[one.arrival].retry_after
        assert told is not None
        assert one.sent >= first[one.arrival].sent + told
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["retried"]["attempts"] == len(again)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://[::1"], "'http://[::1' is no URL like http://host:8080"),
        (["--url", "nowhere", "--model-name", "x"], "'nowhere' is no URL like"),
        (["--url", "http://h:99999", "--model-name", "x"], "'http://h:99999' is no URL like"),
        (["--record-curve", "x", "--url", "http://[::1"], "'http://[::1' is no URL like"),
        (["--plan", "{}/short.toml"], "documents.length: 5 tokens are less than the shortest"),
        (["--rate", "1e308"], "requests (rates and seconds, times --rate and --longer) are more"),
        (["--listen", "5557"], "--listen must be HOST:PORT, such as 10.0.0.5:5557, got '5557'"),
        (["--listen", "127.0.0.1:{}"], "--listen must be HOST:PORT"),
        (["--join", "h:0"], "--join must be HOST:PORT"),
        (["--join", "h:99999999"], "--join must be HOST:PORT"),
        (["--join", "h:1", "--listen", "h:1"], "not allowed with argument"),
        (["--workers", "0"], "--workers must be between 1 and 256, got 0"),
        (["--load-workers", "2"], "unrecognized arguments: --load-workers"),
    ],
)
def test_wrong_arguments_are_named(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = '[documents]\nshare = 0.5\nlength = 5\n[prompts]\nlength = "1k"\n'
    (tmp_path / "short.toml").write_text(document + "[[phase]]\nseconds = 1\nrate = 1")
    words = [word.format(tmp_path) for word in words]
    with pytest.raises(SystemExit) as ended:
        main(["--url", "http://127.0.0.1:9", "--out", str(tmp_path / "out"), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_served_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with simulated() as engine:
        (url,) = engine.urls
        assert served_model(url, None, "") == "longleaf-simulated"
        assert served_model(url, None, "longleaf-simulated") == "longleaf-simulated"
        with pytest.raises(SystemExit) as ended:
            main(["--url", url, "--out", str(tmp_path / "out"), "--model-name", "nope"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"--model-name: {url} serves longleaf-simulated, not 'nope'" in said
    assert not (tmp_path / "out").exists()
    assert served_model("http://127.0.0.1:9", None, "nope") == "nope", "it lists none"


def test_a_port_that_is_taken_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SystemExit) as ended:
            main(["--url", "http://127.0.0.1:9", "--out", str(tmp_path), "--listen", address])
    assert ended.value.code == 2
    assert f"--listen {address}: Address already in use" in capsys.readouterr().err


def test_a_run_ends_where_too_little_meets_the_objective(tmp_path: Path) -> None:
    phase = {"seconds": 10, "rate": 1.0}
    values = {"phase": [phase, phase], "prompts": {"length": 100}, "stop_below": 0.5}
    run = Run(
        plan=parse_plan(values, tmp_path),
        source=PromptSource(DEFAULT_MODELS / "tiny-target", 500, seed=1),
        slo=Slo(ttft_ms=100),
        url="http://127.0.0.1:1", model="tiny", key=None, workers=1, out=tmp_path, plan_name="p",
    )  # fmt: skip
    for number in range(10):
        assert not run.saturated_before(1), "half of them met it"
        run.add(
            Record(
                arrival=number, phase=0, turn=1, attempt=1, text="code", prompt_tokens=100,
                max_tokens=9, document=None, sent=float(number), late=0.0, outcome="ok",
                ttft=0.05 if number < 5 else 0.5,
            )
        )  # fmt: skip
    assert not run.saturated_before(1)
    run.add(replace(run.records[-1], arrival=10))
    assert run.saturated_before(1)
    assert not run.saturated_before(0)
