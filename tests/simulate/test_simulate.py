import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from longleaf.simulate.command import simulate_command
from longleaf.simulate.commits import load_commits
from longleaf.simulate.curve import load_curve
from tests.simulate.conftest import LIMIT, Simulated

USER = [{"role": "user", "content": "hello"}]
LABEL = "simulated:h200-ddtree:x20"


def words(count: int, seed: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{seed} " + "rain falls on the old roof " * count}]


def test_every_answer_says_that_it_is_simulated(pair: Simulated) -> None:
    stream = pair.ask(messages=USER, max_tokens=16)
    assert {chunk["system_fingerprint"] for chunk in stream.chunks} == {LABEL}
    assert stream.text.startswith("This answer is simulated. ")
    assert stream.headers["x-longleaf-simulated"] == LABEL
    with pair.open(messages=USER, max_tokens=4, stream=False) as whole:
        assert json.loads(whole.read())["system_fingerprint"] == LABEL
    with pair.open(path="/v1/completions", prompt="x", max_tokens=4, stream=False) as whole:
        assert json.loads(whole.read())["system_fingerprint"] == LABEL
    assert pair.object("/v1/models")["data"][0]["simulated"] == LABEL
    assert pair.object("/server_info")["simulated"] == LABEL
    for path in ("/v1/loads", "/health", "/get_model_info"):
        assert pair.get(path)[0]["x-longleaf-simulated"] == LABEL
    assert pair.refusal(messages=[], max_tokens=4)[1]["x-longleaf-simulated"] == LABEL


def test_every_metric_says_that_it_is_simulated(pair: Simulated) -> None:
    pair.ask(messages=USER, max_tokens=16)
    samples = [line for line in pair.get("/metrics")[1].splitlines() if not line.startswith("#")]
    assert any(line.startswith("longleaf_commit_len_sum") for line in samples)
    assert any(line.startswith("sglang:num_running_reqs") for line in samples)
    assert [line for line in samples if f'simulated="{LABEL}"' not in line] == []


def test_replicas_are_apart(pair: Simulated) -> None:
    before = [pair.object("/v1/loads", n)["loads"][0] for n in (0, 1)]
    tokens = pair.ask(1, messages=words(40, "apart"), max_tokens=4).usage["prompt_tokens"]
    after = [pair.object("/v1/loads", n)["loads"][0] for n in (0, 1)]
    name = "total_prefill_uncached_tokens"
    assert after[0][name] == before[0][name]
    assert after[1][name] == before[1][name] + tokens


@pytest.mark.parametrize("kind", ["predictable", "code", "prose"])
def test_commit_len_is_the_kinds(pair: Simulated, kind: str) -> None:
    stream = pair.ask(messages=USER, max_tokens=2001, seed=7, metadata={"text": kind})
    spec = stream.usage["spec_tokens_details"]
    assert stream.usage["completion_tokens"] == 2001
    assert spec["steps"] * spec["commit_len"] == pytest.approx(2000, abs=0.5)
    assert spec["commit_len"] == pytest.approx(load_commits().mean(kind), rel=0.12)


def test_other_metadata_is_the_clients_own(pair: Simulated) -> None:
    prose, poetry, code = (
        pair.ask(messages=USER, max_tokens=200, seed=5, metadata={"text": text}).usage
        for text in ("prose", "poetry", "code")
    )
    assert poetry == prose != code


def test_a_request_without_speculation_gets_a_token_a_step(pair: Simulated) -> None:
    spec = pair.ask(messages=USER, max_tokens=21, speculative=False).usage["spec_tokens_details"]
    assert (spec["steps"], spec["commit_len"]) == (20, 1.0)


def test_a_seed_repeats_an_answer(pair: Simulated) -> None:
    first, second, other = (
        pair.ask(messages=USER, max_tokens=200, seed=seed).usage["spec_tokens_details"]
        for seed in (5, 5, 6)
    )
    assert first == second != other


def test_answers_without_a_limit_end(pair: Simulated) -> None:
    lengths = [pair.ask(messages=USER, seed=seed).usage["completion_tokens"] for seed in range(40)]
    assert 120 < sum(lengths) / 40 < 500  # exponential with a mean of 256
    assert len(set(lengths)) > 20


def test_time_is_the_curves(pair: Simulated) -> None:
    """Reported busy times are exact; what a client sees cannot be shorter."""
    curve = load_curve("h200-ddtree")
    before = pair.object("/v1/loads")["loads"][0]
    stream = pair.ask(messages=words(2500, "time"), max_tokens=101, speculative=False)
    after = pair.object("/v1/loads")["loads"][0]
    length = stream.usage["prompt_tokens"]
    assert length > 12_000
    prefill = curve.prompt_seconds(length) / 20
    busy = (after["total_prefill_busy_us"] - before["total_prefill_busy_us"]) / 1e6
    assert busy == pytest.approx(prefill, rel=0.01)
    assert stream.times[0] >= prefill - 0.01
    steps = sum(curve.step_seconds([length + n]) for n in range(100)) / 20
    old = before["decode_moments"] or [0.0] * 6
    assert (after["decode_moments"][2] - old[2]) / 1e6 == pytest.approx(steps, rel=0.01)
    assert stream.times[-1] - stream.times[0] >= steps - 0.02


def test_a_document_that_was_read_is_not_read_again(pair: Simulated) -> None:
    name = "total_prefill_uncached_tokens"
    pair.ask(messages=words(1500, "shared"), max_tokens=4)
    before = pair.object("/v1/loads")["loads"][0][name]
    messages = [*words(1500, "shared"), {"role": "user", "content": "And then?"}]
    length = pair.ask(messages=messages, max_tokens=4).usage["prompt_tokens"]
    computed = pair.object("/v1/loads")["loads"][0][name] - before
    assert length > 7000
    assert 0 < computed < 50


def test_too_long_and_queue_full_are_sglangs(run_simulated: Callable[..., Any]) -> None:
    limits = ("--max-total-tokens", "4096", "--max-running-requests", "1")
    with run_simulated(*limits, "--max-queued-requests", "0", "--context-length", "8192") as one:
        status, _, text = one.refusal(messages=words(3000, "long"), max_tokens=4)
        assert status == 400
        assert "longer than the model's context length (8192 tokens)" in text
        with one.open(messages=words(700, "pool"), max_tokens=4) as answer:  # a stream: 200
            assert "exceeds the maximum allowed length" in answer.read().decode()
        with one.open(messages=USER, max_tokens=2000) as running:
            running.readline()
            status, _, text = one.refusal(messages=USER, max_tokens=4, stream=False)
            assert status == 503
            assert "The request queue is full." in text


def test_a_client_that_leaves_frees_its_rows(run_simulated: Callable[..., Any]) -> None:
    with run_simulated() as one:
        with one.open(messages=USER, max_tokens=5000) as answer:
            answer.readline()
            assert one.object("/v1/loads")["loads"][0]["num_running_reqs"] == 1
        deadline = time.monotonic() + 20
        while one.object("/v1/loads")["loads"][0]["num_used_tokens"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_signal_lets_answers_end(run_simulated: Callable[..., Any]) -> None:
    with run_simulated(replicas=2) as both:
        with both.open(1, messages=USER, max_tokens=300) as answer:
            answer.readline()
            both.process.send_signal(signal.SIGTERM)
            text = answer.read().decode()
        assert both.process.wait(30) == 0
    assert re.search(r'"completion_tokens":300\b', text)
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--curve", "h300"], "no curve 'h300'"),
        (["--text", "poetry"], "'poetry' is none of predictable, code, prose"),
        (["--replicas", "9", "--port", "65530"], "beyond 65535"),
        (["--max-total-tokens", "1"], "max_total_tokens must be at least 16"),
        (["--speed", "0"], "0.0 is not in the range"),
        (["--speed", "nan"], "nan is not a finite number"),
        (["--answer-tokens", "inf"], "inf is not a finite number"),
        (["--drain-seconds", "nan"], "nan is not a finite number"),
        (["--max-body-bytes", "0"], "0 is not in the range"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(simulate_command, arguments)
    assert result.exit_code != 0
    assert message in result.output


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(simulate_command, ["--tokenizer", str(tmp_path)])
    assert result.exit_code == 1
    assert f"no tokenizer.json in {tmp_path}" in result.output


def test_it_listens_on_ipv6(run_simulated: Callable[..., Any]) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with run_simulated(host="::1", replicas=2) as both:
        for replica in (0, 1):
            assert both.ask(replica, messages=USER, max_tokens=2).usage["completion_tokens"] == 2


def test_a_taken_port_and_too_many_files_are_told_apart() -> None:
    start = f"exec {sys.executable} -m longleaf simulate --replicas"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = _fails(f"{start} 1 --port {port}")
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another" in told
    told = _fails(f"ulimit -n 40; {start} 200 --port 20000")
    assert "(Too many open files); raise the limit of open files (ulimit -n)" in told


def _fails(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr
