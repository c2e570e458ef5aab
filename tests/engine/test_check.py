"""What ``longleaf engine --check-only`` refuses, by the pinned SGLang itself, and what it tells.

Each check is a process of its own, as the launcher's is.
"""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longleaf.engine.check import check_address
from longleaf.engine.drift import DriftError
from longleaf.engine.process import CRASH_ENVIRONMENT
from tests.engine.conftest import MODELS
from tests.engine.starts import Start, Starts

PLAIN = ("--model-path", str(MODELS / "tiny-target"), "--attention-backend", "longleaf_mla")
TREES = (
    *(*PLAIN, "--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", "32"),
    *("--speculative-draft-model-path", str(MODELS / "tiny-drafter"), "--page-size", "1"),
)
pytestmark = pytest.mark.usefixtures("sglang", "installed_plugin")


@pytest.fixture(scope="module")
def starts() -> Iterator[Starts]:
    made = Starts()
    yield made
    made.close()


def check(
    starts: Starts, folder: Path, *arguments: str, before: str = "", **environment: str
) -> Start:
    code = f"""
{before}
from longleaf.engine import check
everything = check.check_all
check.check_all = lambda argv: everything(argv, gpu=False)
raise SystemExit(check.main({list(arguments)!r}))
"""
    return starts.run(code, folder, **environment)


OPTION = "LONGLEAF_ENGINE"
REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "JSON": ("", {OPTION: "{nodes: 3}"}, "LONGLEAF_ENGINE must be a JSON object"),
    "nodes": ("", {OPTION: '{"nodes": [500]}'}, "nodes must be from 1 to 128, got 500"),
    "option": ("", {OPTION: '{"node": [8]}'}, "has no option 'node'"),
    "widest": ("", {OPTION: '{"nodes": [64]}'}, "32 is below the most nodes"),
    "time": ("", {OPTION: '{"step_ms": [[8, 9, -1]]}'}, "milliseconds above 0"),
    "times": ("", {OPTION: '{"step_ms": [[8, 9, 5]]}'}, "step_ms is of [8] nodes, captured are"),
    "prefill": ("", {"LONGLEAF_PREFILL_ATTENTION": "fa9"}, "one of torch, fa3, got 'fa9'"),
    "absorbed": ("", {"LONGLEAF_ABSORBED_EXTEND_TOKENS": "many"}, "got 'many'"),
    "below": ("--speculative-num-draft-tokens 4", {}, "below the drafter's block of 8"),
    "above": ("--speculative-num-draft-tokens 200", {}, "at most 128 nodes"),
    "switch": ("--pp-size 2", {}, "--pp-size is 2"),
    "heads": ("--tp-size 3", {}, "--tp-size is 3, the target has"),
    "graphs": ("--cuda-graph-backend-prefill tc_piecewise", {}, "prefill graphs (tc_piecewise)"),
    "theirs": ("--ssl-certfile /nowhere.pem", {}, "SGLang refuses its arguments (--ssl-certfile"),
    "window": ("--speculative-draft-window-size 0", {}, "--speculative-draft-window-size"),
    "config": ("--config /nowhere.yaml", {}, "--config cannot be read"),
    "huge": ("", {OPTION: f'{{"step_ms": [[8, 9, {10**400}]]}}'}, "beyond any number"),
    "seed": ("", {OPTION: f'{{"sampling_seed": {2**62}}}'}, "sampling_seed must be between"),
    "simulated": ("", {"SGLANG_SIMULATE_ACC_LEN": "3"}, "SGLANG_SIMULATE_ACC_LEN is 3"),
    "no port": ("--port 0", {}, "--port is 0"),
    "port": ("--port 70000", {}, "from 1 to 65535"),
    "no tokenizer": ("--skip-tokenizer-init", {}, "warms the server up with text"),
    "embedding": ("--is-embedding", {}, "by generating"),
    "gRPC": ("--smg-grpc-mode", {}, "over HTTP"),
    "deep": ("", {OPTION: "[" * 100_000}, "LONGLEAF_ENGINE must be a JSON object"),
    "unknown": ("--no-such-option", {}, "SGLang's parser refuses: unrecognized arguments: --no-su"),
    "no value": ("--tp-size", {}, "parser refuses: argument --tp-size"),
    "node": ("--nnodes 2 --node-rank 1", {}, "--node-rank is 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_be_known_is_refused_before_anything_is_loaded(
    starts: Starts, tmp_path: Path, case: str
) -> None:
    words, environment, said = REFUSED[case]
    done = check(starts, tmp_path, *TREES, *words.split(), **environment)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("longleaf engine: ")
    assert said in last
    assert "; fix: " in last
    assert "Traceback" not in done.stderr


def test_a_check_that_fails_itself_says_so(starts: Starts, tmp_path: Path) -> None:
    code = f"""
from longleaf.engine import check
check.guard.check_versions = lambda: 1 / 0
raise SystemExit(check.main({list(TREES)!r}))
"""
    done = starts.run(code, tmp_path)
    assert done.returncode == 2
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("longleaf engine: the check itself failed (ZeroDivisionError: division")


def resolved(starts: Starts, folder: Path, *arguments: str, before: str = "") -> dict[str, Any]:
    """What SGLang makes of arguments that pass, and the client that the launcher is told."""
    code = f"""
{before}
import json
from dataclasses import asdict
from longleaf.engine import check
kept = []
resolve = check.resolve
check.resolve = lambda parsed: kept.append(resolve(parsed)) or kept[0]
args = check.check_all({list(arguments)!r}, gpu=False)
assert args is kept[0]
client = check.server_client(args)
print(json.dumps({{
    "client": asdict(client), "prefill": args.cuda_graph_config.prefill.backend,
    "decode": args.cuda_graph_config.decode.backend, "backends": args.get_attention_backends(),
    "nodes": args.speculative_num_draft_tokens, "block": args.speculative_dflash_block_size,
}}))
"""
    done = starts.run(code, folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


CUDA_DEFAULT = """
from sglang.srt import server_args
made = server_args.default_cuda_graph_config
def default():
    config = made()
    config.prefill.backend = "breakable"
    return config
server_args.default_cuda_graph_config = default
server_args.is_cuda = lambda: True
"""
"""SGLang's prefill graphs where there is a GPU."""


@pytest.fixture
def kimi(tmp_path: Path) -> tuple[str, ...]:
    """The arguments of `PLAIN` with a target of Kimi K2.6's architecture."""
    text = json.loads((MODELS / "tiny-target/config.json").read_text())
    config = {
        **{"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"},
        **{"text_config": text, "vision_config": {}},
    }
    folder = tmp_path / "kimi"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return "--model-path", str(folder), *PLAIN[2:]


def test_kimis_default_of_prefill_graphs_is_taken_back(
    starts: Starts, tmp_path: Path, kimi: tuple[str, ...]
) -> None:
    """SGLang captures the prefills of Kimi K2.6, and of other MLA models not."""
    trees = (*kimi, *TREES[4:])
    found = resolved(starts, tmp_path, *trees, before=CUDA_DEFAULT)
    assert (found["prefill"], found["decode"]) == ("disabled", "full")
    assert (found["nodes"], found["block"]) == (32, 8)
    assert resolved(starts, tmp_path, *PLAIN, before=CUDA_DEFAULT)["prefill"] == "disabled"
    done = check(starts, tmp_path, *kimi, before=CUDA_DEFAULT)
    last = done.stderr.strip().splitlines()[-1]
    assert "SGLang would capture prefill graphs (tc_piecewise)" in last
    assert last.endswith("; fix: --disable-prefill-cuda-graph")
    words = (*kimi, "--disable-prefill-cuda-graph")
    assert resolved(starts, tmp_path, *words, before=CUDA_DEFAULT)["prefill"] == "disabled"


def test_our_backend_under_all_three_names_is_one_backend(starts: Starts, tmp_path: Path) -> None:
    both = ("--prefill-attention-backend", "--decode-attention-backend")
    words = [word for name in both for word in (name, "longleaf_mla")]
    found = resolved(starts, tmp_path, *TREES, *words)
    assert found["backends"] == ["longleaf_mla", "longleaf_mla"]


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("", "http://127.0.0.1:30000"),
        ("--host 0.0.0.0 --port=31000", "http://127.0.0.1:31000"),
        ("--host :: --port 31000", "http://[::1]:31000"),
        ("--host fd00::1", "http://[fd00::1]:30000"),
        ("--host 10.0.0.1", "http://10.0.0.1:30000"),
    ],
)
def test_the_server_is_found_where_its_arguments_put_it(
    starts: Starts, tmp_path: Path, words: str, url: str
) -> None:
    client = resolved(starts, tmp_path, *TREES, *words.split(), "--api-key", "secret")["client"]
    assert client == {"url": url, "api_key": "secret", "certificate": None}


def test_address_and_key_in_a_file_of_arguments_count(starts: Starts, tmp_path: Path) -> None:
    (tmp_path / "key.pem").touch()
    (tmp_path / "cert.pem").touch()
    text = f"port: 31000\napi-key: secret\nssl-keyfile: {tmp_path}/key.pem\n"
    (tmp_path / "c.yaml").write_text(f"{text}ssl-certfile: {tmp_path}/cert.pem\n")
    words = (*TREES, "--config", str(tmp_path / "c.yaml"))
    assert resolved(starts, tmp_path, *words)["client"] == {
        "url": "https://127.0.0.1:31000",
        "api_key": "secret",
        "certificate": f"{tmp_path}/cert.pem",
    }


def test_the_launcher_is_told_and_nobody_else(starts: Starts, tmp_path: Path) -> None:
    words = (*TREES, "--api-key", "secret")
    done = check(starts, tmp_path, *words)
    assert done.returncode == 0
    assert "secret" not in done.stdout
    told = tmp_path / "told"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    code = launcher_told(told, *words, "--port", str(port))
    assert starts.run(code, tmp_path).returncode == 0
    expected = {"url": f"http://127.0.0.1:{port}", "api_key": "secret", "certificate": None}
    assert json.loads(told.read_text()) == expected


def launcher_told(told: Path, *arguments: str) -> str:
    """The check as the launcher runs it."""
    return f"""
import os
from longleaf.engine import check, warmup
os.environ[warmup.CLIENT_VARIABLE] = str(os.open({str(told)!r}, os.O_WRONLY | os.O_CREAT))
everything = check.check_all
check.check_all = lambda argv: everything(argv, gpu=False)
raise SystemExit(check.main({list(arguments)!r}))
"""


def test_an_address_that_is_taken_is_refused_where_a_start_follows(
    starts: Starts, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = (*TREES, "--port", str(other.getsockname()[1]))
        done = starts.run(launcher_told(tmp_path / "told", *words), tmp_path)
        assert done.returncode == 2
        said = done.stderr.strip().splitlines()[-1]
        assert f"cannot listen at --host 127.0.0.1 --port {words[-1]} (Address already in" in said
        assert (tmp_path / "told").read_text() == ""
        assert check(starts, tmp_path, *words).returncode == 0
    assert starts.run(launcher_told(tmp_path / "told", *words), tmp_path).returncode == 0


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused(
    starts: Starts, tmp_path: Path, host: str
) -> None:
    done = starts.run(launcher_told(tmp_path / "told", *TREES, "--host", host), tmp_path)
    assert done.returncode == 2
    said = done.stderr.strip().splitlines()[-1]
    assert f"cannot listen at --host {host}" in said
    assert said.endswith("fix: give an address of this machine and a free port")


def test_an_address_that_the_machine_lacks_is_left_out_beside_one_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    lacking = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))
    args = SimpleNamespace(host="localhost", port=0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [lacking, there])
    check_address(args)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [lacking])
    with pytest.raises(DriftError, match="cannot listen at --host localhost"):
        check_address(args)


CRASH = """
from types import SimpleNamespace
from sglang.srt.managers.tokenizer_manager import TokenizerManager
manager = SimpleNamespace(crash_dump_folder="", crash_dump_performed=False)
TokenizerManager.dump_requests_before_crash(manager)
print(manager.crash_dump_performed)
"""


def test_sglang_waits_for_no_dumps_where_the_launcher_started_it(
    starts: Starts, tmp_path: Path
) -> None:
    assert starts.run(CRASH, tmp_path, **CRASH_ENVIRONMENT).stdout == "False\n"
