"""What the check under tensor parallelism computes, without a GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ops.gpu import ranks
from ops.gpu.client import EngineError
from ops.gpu.models import DummyDrafter, DummyTarget
from ops.gpu.pairs import long, tiny
from ops.gpu.plugin_distribution import install
from ops.gpu.servers import Method, Server, command_of, free_port
from ops.gpu.tp_check import beside, specs
from ops.gpu.tp_report import rows_of


def write(folder: Path, *files: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    for rank, lines in enumerate(files):
        ranks.rank_file(folder, rank).write_text("".join(f"{line}\n" for line in lines))


def test_ranks_that_decide_alike_do_not_differ(tmp_path: Path) -> None:
    lines = [f"tree{i} path{i} tokens{i}" for i in range(20)]
    write(tmp_path, lines, lines[:19])  # the last step is under way
    found = ranks.compare(tmp_path, 2)
    assert (found.steps, found.mismatched) == (19, 0)
    assert ranks.compare(tmp_path, 2, skipped=15).steps == 4
    assert ranks.steps_written(tmp_path) == 20
    assert ranks.steps_written(tmp_path / "none") == 0


def test_each_kind_of_difference_is_counted(tmp_path: Path) -> None:
    first = ["a b c"] * 10
    second = ["a b c", "x b c", "a y z", "a b z", *["a b c"] * 6]
    write(tmp_path, first, second, first)
    found = ranks.compare(tmp_path, 3)
    assert found.mismatched == 3
    assert found.by_decision == {"trees": 1, "paths": 1, "tokens": 2}


def test_a_rank_that_stays_behind_is_a_mismatch(tmp_path: Path) -> None:
    write(tmp_path, ["a b c"] * 9, ["a b c"] * 4)
    assert ranks.compare(tmp_path, 2).mismatched == 5


def test_a_rank_computes_what_one_gpu_with_fewer_heads_computes() -> None:
    """Everything of a dummy that is not divided by heads is divided by ranks."""
    many, one = DummyTarget(heads=64, expert_size=64 * 4), DummyTarget(heads=16)
    assert many.heads // 4 == one.heads
    assert many.config()["moe_intermediate_size"] // 4 == one.config()["moe_intermediate_size"]
    drafter = DummyDrafter(target=many, heads=64, kv_heads=8).config()
    assert drafter["num_key_value_heads"] % 4 == 0
    spec = long(Method.DDTREE, "x", (9,), heads=64, ranks=4)
    assert json.loads((spec.target / "config.json").read_text())["num_attention_heads"] == 64
    assert spec.tensor_parallel == 4


def test_several_gpus_leave_multicast_off() -> None:
    for spec in specs(4, 64, ("ranks", "steps", "kill"), nccl=False).values():
        many = spec.tensor_parallel > 1
        words = spec.command(31_000, Path("r"))
        assert ("--enforce-disable-flashinfer-allreduce-fusion" in words) == many
        for name in ("NCCL_NVLS_ENABLE", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"):
            assert spec.variables().get(name) == ("0" if many else None)
    named = specs(4, 64, ("kill",), nccl=True)
    assert list(named) == ["many"]
    assert "--disable-custom-all-reduce" in named["many"].flags
    assert named["many"].launched


def test_a_plugin_is_installed_by_its_name(tmp_path: Path) -> None:
    install(tmp_path, "some_plugin", "some.module:register")
    text = (tmp_path / "some_plugin-0.dist-info/entry_points.txt").read_text()
    assert text == "[sglang.srt.plugins]\nsome_plugin = some.module:register\n"


SLEEPER = """
import subprocess, sys, time
sleep = "import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", sleep, "scheduler_" + "TP1"])
child.wait()
sys.exit(7)
"""


def test_a_rank_is_found_killed_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny(Method.STOCK_PLAIN).variant("two", tensor_parallel=2)
    monkeypatch.setattr(type(spec), "command", lambda *given: [sys.executable, "-c", SLEEPER])
    server = Server(spec, free_port(0), tmp_path)
    try:
        assert server.wait_end(0.5) is None
        pid = wait_for_rank(server)
        assert command_of(pid).endswith("scheduler_TP1")
        with pytest.raises(EngineError, match="no process of rank 3"):
            server.rank_process(3)
        subprocess.run(["kill", "-9", str(pid)], check=True)
        assert server.wait_end(20) == 7
        assert command_of(pid) == ""
    finally:
        server.stop()


MEASURES = """
import sys, time
from pathlib import Path
from ops.gpu.pairs import tiny
from ops.gpu.servers import Method, Server, ServerSpec, free_port
ServerSpec.command = lambda *given: [sys.executable, "-c", "import time; time.sleep(60)"]
server = Server(tiny(Method.STOCK_PLAIN), free_port(0), Path(sys.argv[1]))
print(server.processes()[0], flush=True)
time.sleep(60)
"""


def test_a_measurement_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURES, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as measurement:
        assert measurement.stdout is not None
        pid = int(measurement.stdout.readline())
        assert "sleep(60)" in command_of(pid)
        measurement.kill()
    end = time.monotonic() + 20
    while command_of(pid):
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for_rank(server: Server) -> int:
    for _ in range(100):
        try:
            return server.rank_process(1)
        except EngineError:
            assert server.wait_end(0.1) is None
    raise AssertionError("no rank came up")


def test_a_command_beside_ends_with_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.gpu.tp_check.LOGS", tmp_path)
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with beside(f'{sys.executable} -c "{code}"'):
        while not (mark.exists() and mark.read_text()):
            pass
        pid = int(mark.read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with beside(None):
        pass


def test_rows_of_a_whole_check_and_of_one_that_was_cut_short() -> None:
    step = {"context": 65_536, "spread": [1.0, 2.0], "steps": 9}
    document = {
        "tp": 4,
        "steps": [
            {"server": "many", "ms": 9.0, **step},
            {"server": "one", "ms": 6.0, **step},
            {"server": "plain", "ms": 4.5, **step},
        ],
        "ranks": [
            {"kind": "greedy", "steps": 700, "mismatched": 0},
            {"kind": "sampled", "steps": 600, "mismatched": 2},
        ],
        "answers": [{"compared": 50, "parted": 7, "wrong": []}],
        "kill": [
            {
                "gateway": '{"error": {"message": "the replica ended the answer"}}',
                "launcher_status": 1,
                "launcher_said": "longleaf engine: the server ended by itself with status 1",
                "processes_left": 0,
                "mib_left": [3, 0, 0, 0],
            }
        ],
    }
    rows = {row.name: row for row in rows_of(document)}
    assert rows["tp4_step_ms_64k"].value == 9.0
    assert rows["tp4_step_over_tp1_64k"].value == 1.5
    assert rows["tp4_step_over_plain_64k"].value == 2.0
    assert rows["tp4_step_ms_1k"].why == "not measured"
    assert (rows["tp4_mismatched_steps"].value, rows["tp4_mismatched_steps"].met) == (2, False)
    assert rows["tp4_compared_steps"].value == 600
    assert rows["tp4_kill_error_event"].met
    assert rows["tp4_kill_launcher_status"].met
    assert rows["tp4_kill_mib_left"].met
    assert rows["tp4_allreduce_ms_64k"].why == "not measured"
    empty = {row.name: row for row in rows_of({"tp": 2})}
    assert {row.value for row in empty.values()} == {None}
