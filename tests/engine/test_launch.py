"""The launcher with real processes. The server is a stand-in (see standin.py): SGLang cannot serve
without a GPU; tests/gpu/engine starts the real one.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from longleaf.engine import warmup
from longleaf.engine.launch import engine_command
from longleaf.engine.process import CRASH_ENVIRONMENT, Server

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "tests/engine/standin.py"
RUN = """
import sys
from pathlib import Path
from longleaf.engine.launch import Launcher, LaunchConfig
ready, seconds, check, server, *arguments = sys.argv[1:]
raise SystemExit(Launcher(LaunchConfig(
    tuple(arguments), Path(ready), float(seconds), 10.0,
    (sys.executable, "-c", check), (sys.executable, server),
)).run())
"""


@dataclass
class Launched:
    process: "subprocess.Popen[str]"
    ready: Path
    log: Path
    port: int

    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def wait_ready(self) -> None:
        end = time.monotonic() + 60
        while not self.ready.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


TELLS = """
import argparse, json, os
from longleaf.engine.warmup import CLIENT_VARIABLE
parser = argparse.ArgumentParser()
parser.add_argument("--port")
parser.add_argument("--url", default="http://127.0.0.1")
parser.add_argument("--certificate")
known, _ = parser.parse_known_args()
told = {"url": f"{known.url}:{known.port}", "api_key": None, "certificate": known.certificate}
with open(int(os.environ[CLIENT_VARIABLE]), "w") as pipe:
    json.dump(told, pipe)
"""
"""The check's last act, with the stand-in's address in place of SGLang's."""


def launch(
    tmp_path: Path,
    *arguments: str,
    check: str = TELLS,
    seconds: float = 60.0,
    ready: Path | None = None,
) -> Launched:
    port, ready, log = free_port(), ready or tmp_path / "ready", tmp_path / "log"
    log.touch()
    standin = ["--port", str(port), "--log", str(log), *arguments]
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(ready), str(seconds), check, str(STANDIN), *standin],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "service"),
            # A proxy that answers nothing: what is on this machine is not asked for through it.
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
            "no_proxy": "",
        },
    )
    return Launched(process, ready, log, port)


def nothing_listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def test_ready_comes_after_the_warm_up_and_sigterm_drains(tmp_path: Path) -> None:
    launched = launch(tmp_path)
    launched.wait_ready()
    requests = launched.requests()
    assert {"get": "/model_info"} in requests
    assert {"get": "/v1/loads"} in requests
    assert {"get": "/health"} not in requests
    bodies = [item for item in requests if "text" in item]
    assert [item["sampling_params"]["temperature"] for item in bodies] == [0, 0.8, 0, 0, 0, 0, 0]
    assert bodies[2]["text"].startswith(bodies[0]["text"])
    assert bodies[3]["text"].startswith(bodies[0]["text"])
    assert len(bodies[3]["text"]) > len(bodies[2]["text"]) + 1000
    assert [len(item["text"]) for item in bodies[4:6]] == [len("One by one"), 2]
    assert all("repetition_penalty" in item["sampling_params"] for item in bodies[4:6])
    assert "json_schema" in bodies[6]["sampling_params"]
    launched.process.send_signal(signal.SIGTERM)
    out, err = launched.process.communicate(timeout=30)
    assert launched.process.returncode == 0
    assert out.startswith("ready after ")
    assert out.count("\n") == 1
    assert "standin: draining" in err
    assert not launched.ready.exists()
    assert nothing_listens(launched.port)


def test_sigint_drains_too_and_no_grammar_means_no_schema(tmp_path: Path) -> None:
    launched = launch(tmp_path, "--grammar", "none")
    launched.wait_ready()
    assert sum("text" in item for item in launched.requests()) == 6
    launched.process.send_signal(signal.SIGINT)
    launched.process.communicate(timeout=30)
    assert launched.process.returncode == 0


def test_a_drift_starts_nothing(tmp_path: Path) -> None:
    launched = launch(tmp_path, check="raise SystemExit(2)")
    _, err = launched.process.communicate(timeout=30)
    assert launched.process.returncode == 2
    assert "standin" not in err
    assert not launched.ready.exists()


def test_a_server_that_dies_starting_is_told_with_its_last_lines(tmp_path: Path) -> None:
    launched = launch(tmp_path, "--mode", "dies")
    out, err = launched.process.communicate(timeout=30)
    assert launched.process.returncode == 7
    assert out == ""
    said = err[err.index("longleaf engine: ") :]
    assert "ended with status 7 before it was ready, waiting for /model_info" in said
    assert "CUDA out of memory" in said


def test_a_server_that_dies_in_the_warm_up_is_told(tmp_path: Path) -> None:
    launched = launch(tmp_path, "--mode", "dies-warming")
    out, err = launched.process.communicate(timeout=60)
    assert launched.process.returncode == 9
    assert out == ""
    assert "scheduler died" in err[err.index("longleaf engine: the server ended") :]


def test_a_warm_up_that_fails_ends_the_server(tmp_path: Path) -> None:
    launched = launch(tmp_path, "--mode", "refuses")
    out, err = launched.process.communicate(timeout=30)
    assert launched.process.returncode == 1
    assert out == ""
    assert "the warm-up request (greedy) failed: /generate answered 500" in err
    assert "no kernel image" in err
    assert nothing_listens(launched.port)


def test_a_server_that_dies_later_is_told_and_is_not_ready(tmp_path: Path) -> None:
    launched = launch(tmp_path, "--mode", "dies-later")
    out, err = launched.process.communicate(timeout=30)
    assert launched.process.returncode == 9
    assert out.startswith("ready after ")
    assert "ended by itself with status 9" in err
    assert not launched.ready.exists()


@pytest.mark.parametrize(
    ("given", "found"), [({}, "0"), ({"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "1"}, "1")]
)
def test_a_crash_waits_for_dumps_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], found: str
) -> None:
    for name in CRASH_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    code = "import os; print(os.environ['SGLANG_CUDA_COREDUMP_BEFORE_CRASH'])"
    server = Server([sys.executable, "-c", code])
    assert server.wait(30) == 0
    assert server.tail() == f"{found}\n"


def test_a_start_that_takes_too_long_says_what_it_waits_for(tmp_path: Path) -> None:
    launched = launch(tmp_path, "--mode", "hangs", seconds=11.0)
    _, err = launched.process.communicate(timeout=60)
    assert launched.process.returncode != 0
    assert "10 s, waiting for /model_info" in err
    assert "not ready after 11 s (--start-seconds), waiting for /model_info" in err


def test_a_stale_ready_file_is_removed_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "ready").write_text("old")
    launched = launch(tmp_path, check="raise SystemExit(2)")
    launched.process.communicate(timeout=30)
    assert not launched.ready.exists()


def test_a_second_start_with_the_same_ready_file_harms_nothing(tmp_path: Path) -> None:
    first = launch(tmp_path)
    first.wait_ready()
    second = launch(tmp_path)
    _, err = second.process.communicate(timeout=30)
    assert second.process.returncode == 2
    assert f"--ready-file {first.ready} is that of a running longleaf engine; fix: " in err
    assert first.ready.exists()
    first.process.terminate()
    first.process.communicate(timeout=30)
    assert not first.ready.exists()


def test_a_second_start_at_the_same_address_is_not_taken_for_the_first(tmp_path: Path) -> None:
    """Either would answer the other's warm-up; SGLang binds its port minutes after its start."""
    first = launch(tmp_path)
    first.wait_ready()
    second = launch(tmp_path, "--port", str(first.port), ready=tmp_path / "other")
    _, err = second.process.communicate(timeout=30)
    assert second.process.returncode == 2
    assert f"another longleaf engine holds http://127.0.0.1:{first.port}; fix: " in err
    assert "standin" not in err
    first.process.terminate()
    first.process.communicate(timeout=30)


@pytest.mark.parametrize("name", ["no/such/folder/ready", "."])
def test_a_ready_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, name: str) -> None:
    launched = launch(tmp_path, ready=tmp_path / name)
    _, err = launched.process.communicate(timeout=30)
    assert launched.process.returncode == 2
    assert f"--ready-file {tmp_path / name} cannot be written" in err
    assert err.count("\n") == 1


def test_a_killed_launcher_takes_its_server_along(tmp_path: Path) -> None:
    launched = launch(tmp_path)
    launched.wait_ready()
    launched.process.kill()
    launched.process.communicate(timeout=30)
    end = time.monotonic() + 30
    while not nothing_listens(launched.port):
        assert time.monotonic() < end
        time.sleep(0.02)
    again = launch(tmp_path, check="raise SystemExit(2)")  # what it left is not a running one's
    again.process.communicate(timeout=30)
    assert again.process.returncode == 2
    assert not again.ready.exists()


SLEEPS = "import os, time; open({mark!r}, 'w').write(str(os.getpid())); time.sleep(60)"


def wait_for_pid(mark: Path) -> int:
    end = time.monotonic() + 60
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return int(mark.read_text())


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_check_alone_ends_with_its_command(tmp_path: Path, number: signal.Signals) -> None:
    mark = tmp_path / "checking"
    check = (sys.executable, "-c", SLEEPS.format(mark=str(mark)))
    code = f"from longleaf.engine.launch import run_check; raise SystemExit(run_check((), {check}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "service")}
    )
    pid = wait_for_pid(mark)
    process.send_signal(number)
    assert process.wait(30) == (143 if number is signal.SIGTERM else -9)
    wait_until_gone(pid)


@pytest.mark.parametrize("words", ["--start-seconds nan", "--stop-seconds -1", "--stop-seconds 0"])
def test_a_time_that_is_none_is_refused(words: str) -> None:
    result = CliRunner().invoke(engine_command, words.split())
    assert result.exit_code == 2
    assert f"Invalid value for '{words.split()[0]}'" in result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_check_ends_both(tmp_path: Path, number: signal.Signals) -> None:
    """As the first process of a container, too, which has no default action for signals."""
    mark = tmp_path / "checking"
    launched = launch(tmp_path, check=SLEEPS.format(mark=str(mark)))
    pid = wait_for_pid(mark)
    launched.process.send_signal(number)
    launched.process.communicate(timeout=30)
    assert launched.process.returncode in {128 + number, -number}
    if number is signal.SIGTERM:  # by a handler, not by the default action
        assert launched.process.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert launched.requests() == []


def test_the_key_is_sent(tmp_path: Path) -> None:
    launched = launch(tmp_path, "--grammar", "none")
    launched.wait_ready()
    warmup.Client(f"http://127.0.0.1:{launched.port}", "secret").generate({"text": "x"}, 10.0)
    assert launched.requests()[-1]["authorization"] == "Bearer secret"
    launched.process.terminate()
    launched.process.communicate(timeout=30)


def test_an_https_server_is_known_by_its_own_certificate(tmp_path: Path) -> None:
    """From an authority that nobody here knows, for a name that is not the loopback's."""
    trustme = pytest.importorskip("trustme")
    served, other = (trustme.CA().issue_cert("engine.example") for _ in range(2))
    file, wrong = tmp_path / "served.pem", tmp_path / "other.pem"
    served.private_key_and_cert_chain_pem.write_to_path(file)
    other.private_key_and_cert_chain_pem.write_to_path(wrong)
    launched = launch(tmp_path, "--url", "https://127.0.0.1", "--certificate", str(file))
    launched.wait_ready()
    assert launched.ready.read_text() == f"https://127.0.0.1:{launched.port}\n"
    url = f"https://127.0.0.1:{launched.port}"
    assert warmup.Client(url, None, str(file)).get("/model_info", 10.0) == {}
    with pytest.raises(warmup.HttpError, match="CERTIFICATE_VERIFY_FAILED"):
        warmup.Client(url, None, str(wrong)).get("/model_info", 10.0)
    with pytest.raises(warmup.HttpError, match="No such file"):
        warmup.Client(url, None, str(tmp_path / "gone.pem")).get("/model_info", 10.0)
    launched.process.terminate()
    launched.process.communicate(timeout=30)


def test_a_server_on_ipv6_is_reached(tmp_path: Path) -> None:
    launched = launch(tmp_path, "--url", "http://[::1]", "--host", "::1")
    launched.wait_ready()
    assert launched.ready.read_text() == f"http://[::1]:{launched.port}\n"
    launched.process.terminate()
    launched.process.communicate(timeout=30)


def test_an_argument_of_sglangs_before_the_dashes_is_told_its_place() -> None:
    result = CliRunner().invoke(engine_command, ["--check-only", "--model-path", "x"])
    assert result.exit_code == 2
    assert "No such option '--model-path'. SGLang's arguments go after --." in result.output


def test_help_of_sglangs_arguments_is_no_failure(tmp_path: Path) -> None:
    launched = launch(tmp_path, "--help", check="print('usage: longleaf engine --')")
    out, err = launched.process.communicate(timeout=30)
    assert (launched.process.returncode, out, err) == (0, "usage: longleaf engine --\n", "")


def test_a_check_that_tells_no_address_starts_nothing(tmp_path: Path) -> None:
    launched = launch(tmp_path, check="pass")
    _, err = launched.process.communicate(timeout=30)
    assert launched.process.returncode == 1
    assert "the check did not tell where the server will listen" in err
    assert "standin" not in err
