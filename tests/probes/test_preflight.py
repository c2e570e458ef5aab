"""``longleaf preflight`` on recorded facts and real model files, with stand-ins of the trials."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.probes.preflight.command import preflight_command
from longleaf.probes.preflight.expected import Expected, parse_bytes
from longleaf.probes.preflight.facts import Facts, collect, parse_gpus
from longleaf.probes.preflight.model import pool_bytes_per_token
from longleaf.probes.preflight.report import run_checks
from longleaf.probes.preflight.trials import Trials, run_together
from longleaf.probes.preflight.verdict import Verdict

GIB = 1 << 30
NAME = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
LABEL = "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition"
GPUS = "".join(f"{index}, {NAME}, 12.0, 97887, 97251, 580.95.05\n" for index in range(8))
FACTS = Facts(parse_gpus(GPUS), None, 32 * GIB)
RIGHT = f"{sys.executable}", "-c", "print('right')"
TRIALS = Trials(kernel=RIGHT, all_reduce=RIGHT)
EXPECTED = Expected(
    products=("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", LABEL),
    compute_majors=(12,),
    minimum_driver="580.65",
    shared_memory=32 * GIB,
    target=DEFAULT_MODELS / "tiny-target",
    drafter=DEFAULT_MODELS / "tiny-drafter",
    block_size=8,
    nodes=32,
    context_length=8192,
    kv_pool_tokens=218_000,
)


def verdicts(
    facts: Facts = FACTS, expected: Expected = EXPECTED, trials: Trials = TRIALS
) -> dict[str, Verdict]:
    return {one.name: one for one in run_checks(facts, expected, trials)}


def failures(
    facts: Facts = FACTS, expected: Expected = EXPECTED, trials: Trials = TRIALS
) -> dict[str, str]:
    found = verdicts(facts, expected, trials).values()
    assert all(one.fix for one in found if one.passed is False)
    return {one.name: one.said for one in found if one.passed is False}


def test_the_right_node_passes_every_check() -> None:
    found = verdicts()
    assert {name: one.passed for name, one in found.items()} == dict.fromkeys(found, True)
    assert len(found) == 10


def _with(index: int, **changes: Any) -> Facts:
    gpus = list(FACTS.gpus)
    gpus[index] = replace(gpus[index], **changes)
    return replace(FACTS, gpus=tuple(gpus))


@pytest.mark.parametrize(
    ("facts", "name", "said"),
    [
        (replace(FACTS, gpus=FACTS.gpus[:7]), "gpu-count", "sees 7 GPUs, the engine runs on 8"),
        (_with(3, name="NVIDIA H200"), "gpu-product", "is a NVIDIA H200"),
        (
            _with(3, name="NVIDIA RTX PRO 6000 Blackwell Server Edition"),
            "gpu-product",
            "the GPUs differ",
        ),
        (_with(2, capability=(9, 0)), "compute-capability", "GPU 2 has compute capability 9.0"),
        (_with(2, capability=None), "compute-capability", "capability unknown"),
        (_with(5, driver="575.57.08"), "driver", "575.57.08, CUDA 13.0 needs 580.65"),
        (_with(7, memory_free=2 * GIB), "gpu-memory", "GPU 7 has 2.0 GiB free"),
        (replace(FACTS, shared_memory=64 << 20), "shared-memory", "has 0.06 GiB, 32.00 GiB"),
        (replace(FACTS, shared_memory=None), "shared-memory", "has 0.00 GiB"),
    ],
)
def test_each_fault_of_a_node_fails_its_check_alone(facts: Facts, name: str, said: str) -> None:
    expected = replace(EXPECTED, kv_pool_tokens=1_000_000)
    found = failures(facts, expected)
    assert list(found) == [name]
    assert said in found[name]


def test_a_driver_is_compared_by_number() -> None:
    assert failures(_with(0, driver="1000.1")) == {}
    assert "driver" in failures(_with(0, driver="580.9"))


def test_without_gpus_one_check_fails_and_those_on_gpus_are_left_out() -> None:
    facts = replace(FACTS, gpus=(), gpu_error="nvidia-smi is not there")
    found = verdicts(facts)
    assert list(failures(facts)) == ["gpu-count"]
    left = [name for name, one in found.items() if one.passed is None]
    assert left == [
        *("gpu-product", "compute-capability", "driver", "gpu-memory", "kernel", "nccl")
    ]


def _models(tmp_path: Path, **drafter_changes: Any) -> Expected:
    for name in ("tiny-target", "tiny-drafter"):
        folder = tmp_path / name
        folder.mkdir()
        for path in (DEFAULT_MODELS / name).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "tiny-drafter" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **drafter_changes}))
    return replace(EXPECTED, target=tmp_path / "tiny-target", drafter=tmp_path / "tiny-drafter")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 4095}, "vocab_size is 4095, the target's is 4096"),
        ({"sliding_window": None}, "sliding layers and sliding_window is None"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 0}},
            "YaRN has factor 0",
        ),
    ],
)
def test_a_drafter_that_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    found = failures(expected=_models(tmp_path, **changes))
    assert list(found) == ["drafter"]
    assert said in found["drafter"]


def test_block_and_window_are_held_to_the_drafters_own(tmp_path: Path) -> None:
    expected = _models(tmp_path)
    found = failures(expected=replace(expected, block_size=16))
    assert "block_size" in found["drafter"]
    window = json.loads((tmp_path / "tiny-drafter" / "config.json").read_text())["sliding_window"]
    found = failures(expected=replace(expected, draft_window=window - 1))
    assert f"below the window of {window}" in found["drafter"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    expected = _models(tmp_path)
    assert expected.target is not None
    weights = expected.target / "model.safetensors"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (expected.target / "model.safetensors.index.json").write_text(json.dumps(index))
    weights.rename(expected.target / "model-1.safetensors")
    found = failures(expected=expected)
    assert "lacks 1 of 2 weight files, model-2.safetensors first" in found["target"]
    (expected.target / "config.json").unlink()
    assert "cannot be read" in failures(expected=expected)["target"]


def test_a_weight_file_that_ends_early_is_named(tmp_path: Path) -> None:
    expected = _models(tmp_path)
    assert expected.target is not None
    weights = expected.target / "model.safetensors"
    whole = weights.read_bytes()
    for kept in (len(whole) - 1, len(whole) // 2, 100, 4, 0):
        weights.write_bytes(whole[:kept])
        found = failures(expected=expected)["target"]
        assert f"{weights}" in found
        assert f"{kept} bytes" in found
    weights.write_bytes(whole + b"\0")
    assert (
        f"has {len(whole) + 1} bytes, its header tells of {len(whole)}"
        in (failures(expected=expected)["target"])
    )
    weights.write_bytes(b"<html>" * 99)
    assert "no whole safetensors file" in failures(expected=expected)["target"]
    weights.write_bytes(whole)
    assert failures(expected=expected) == {}


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ([], "cannot be read"),
        ({}, "cannot be read (KeyError: 'weight_map')"),
        ({"weight_map": []}, "cannot be read"),
        ({"weight_map": {}}, "it names no file"),
        ({"weight_map": {"a": 3}}, "cannot be read (TypeError"),
        ({"weight_map": {"a": "../../../../etc/passwd"}}, "outside of the model's directory"),
        ({"weight_map": {"a": "/etc/passwd"}}, "names /etc/passwd, outside"),
    ],
)
def test_a_wrong_index_is_one_sentence(tmp_path: Path, index: object, said: str) -> None:
    expected = _models(tmp_path)
    assert expected.target is not None
    (expected.target / "model.safetensors.index.json").write_text(json.dumps(index))
    assert said in failures(expected=expected)["target"]


WRONG: tuple[object, ...] = ("many", [], {}, -1, 1.5, True)
FIELDS = (
    *("max_position_embeddings", "num_hidden_layers", "kv_lora_rank", "vocab_size", "head_dim"),
    *("num_key_value_heads", "rope_scaling", "layer_types", "block_size"),
)


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_whatever_a_config_holds_each_check_has_a_verdict(tmp_path: Path, name: str) -> None:
    expected = _models(tmp_path)
    path = tmp_path / f"tiny-{name}" / "config.json"
    right = json.loads(path.read_text())
    broken = (b"\xff\xfe{}", b"[1]", b"[" * 100_000, b"")
    changed = [json.dumps({**right, field: value}) for field in FIELDS for value in WRONG]
    for config in (*broken, *(one.encode() for one in changed)):
        path.write_bytes(config)
        checks = run_checks(FACTS, expected, TRIALS, ("kernel", "nccl"))
        found = {one.name: one for one in checks}
        assert len(found) == 10
        assert found["gpu-count"].passed
        assert all(one.fix for one in found.values() if one.passed is False)
        assert config not in broken or found[name].passed is False


def test_a_check_that_cannot_be_made_has_failed() -> None:
    trials = Trials(kernel=("/nowhere/to/be/found",), all_reduce=RIGHT)
    found = verdicts(trials=trials)
    assert found["kernel"].passed is False
    assert "could not be made: FileNotFoundError" in found["kernel"].said
    assert found["nccl"].passed


def test_the_pool_is_counted_as_it_is_laid_out() -> None:
    """Kimi K2.6 and its drafter on eight ranks: 61 latent rows, and one KV head of 6 layers."""
    target = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}
    drafter = {"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 6}
    assert pool_bytes_per_token(target, None, 8, "auto") == 61 * 1152
    assert pool_bytes_per_token(target, None, 8, "fp8_e4m3") == 61 * 576
    assert pool_bytes_per_token(target, drafter, 8, "auto") == 61 * 1152 + 6 * 2 * 128 * 2


def test_a_pool_that_does_not_fit_says_how_many_tokens_would() -> None:
    found = verdicts(expected=replace(EXPECTED, kv_pool_tokens=50_000_000))["gpu-memory"]
    assert found.passed is False
    assert found.fix is not None
    tokens = int(found.fix.split()[1].rstrip(","))
    assert verdicts(expected=replace(EXPECTED, kv_pool_tokens=tokens))["gpu-memory"].passed
    more = replace(EXPECTED, kv_pool_tokens=tokens + 100)
    assert verdicts(expected=more)["gpu-memory"].passed is False


def _python(source: str) -> tuple[str, ...]:
    return sys.executable, "-c", source


def test_a_wrong_kernel_is_reported_in_its_own_words() -> None:
    trials = replace(TRIALS, kernel=_python("print('off by 0.3'); raise SystemExit(1)"))
    assert failures(trials=trials) == {"kernel": "off by 0.3"}


def test_a_hung_all_reduce_is_ended_and_its_ranks_named() -> None:
    """Ranks 1 and 3 never return; the others do."""
    source = "import sys, time; time.sleep(60 if int(sys.argv[1]) % 2 else 0)"
    trials = replace(TRIALS, all_reduce=_python(source))
    begin = time.monotonic()
    facts = replace(FACTS, gpus=FACTS.gpus[:4])
    expected = replace(EXPECTED, gpus=4, nccl_seconds=3.0)
    found = verdicts(facts, expected, trials)["nccl"]
    assert time.monotonic() - begin < 30
    assert found.passed is False
    assert "over 4 GPUs did not end in 3 s (waiting: ranks 1, 3)" in found.said
    assert "NCCL_P2P_DISABLE=1" in str(found.fix)


def test_one_failed_rank_ends_the_others() -> None:
    source = "import sys, time\nif sys.argv[1] == '2': sys.exit('no transport')\ntime.sleep(60)"
    trials = replace(TRIALS, all_reduce=_python(source))
    expected = replace(EXPECTED, gpus=4, nccl_seconds=50.0)
    begin = time.monotonic()
    found = verdicts(replace(FACTS, gpus=FACTS.gpus[:4]), expected, trials)["nccl"]
    assert time.monotonic() - begin < 30
    assert found.said == "NCCL's all-reduce failed on rank 2: no transport"


def test_what_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    """Children of a stopped command are ended too."""
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(4); open({str(mark)!r}, 'w')"
    source = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])"
    ((status, _),) = run_together([_python(source + "; time.sleep(60)")], 1.0)
    assert status is None
    time.sleep(4.5)
    assert not mark.exists()


def test_a_stopped_preflight_ends_its_ranks(tmp_path: Path) -> None:
    """As the first process of its container, too."""
    mark = tmp_path / "rank"
    rank = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    script = (
        "import sys\n"
        "from longleaf.probes.preflight import command\n"
        "from longleaf.probes.preflight.trials import Trials\n"
        "from tests.probes.test_preflight import FACTS\n"
        f"command.Trials = lambda: Trials(kernel=(sys.executable, '-c', {rank!r}))\n"
        "command.collect = lambda: FACTS\n"
        "command.preflight_command(['--json'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        try:
            deadline = time.monotonic() + 60
            while not (mark.exists() and mark.read_text()):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 128 + signal.SIGTERM
        finally:
            process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_facts_are_read_from_the_driver(tmp_path: Path) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat <<'E'\n{GPUS}E\n")
    script.chmod(0o755)
    facts = collect([str(script)], tmp_path)
    assert facts.gpus == FACTS.gpus
    assert facts.gpus[0].memory_total == 97_887 << 20
    assert facts.shared_memory is not None
    assert facts.shared_memory > GIB
    script.write_text("#!/bin/sh\necho 'Failed to initialize NVML' >&2; exit 9\n")
    assert collect([str(script)]).gpu_error == (
        f"{script} ended with status 9: Failed to initialize NVML"
    )
    assert collect([str(tmp_path / "none")]).gpu_error == f"{tmp_path / 'none'} is not there"


def test_memory_that_a_driver_does_not_tell_is_no_failure() -> None:
    gpus = parse_gpus("0, NVIDIA GB10, 12.1, [N/A], [N/A], 580.95\n")
    assert gpus[0].memory_free is None
    facts = Facts(gpus, None, 32 * GIB)
    expected = replace(EXPECTED, gpus=1, products=("NVIDIA GB10",))
    found = verdicts(facts, expected)["gpu-memory"]
    assert found.passed is None


def test_the_command_speaks_json_and_ends_with_status_1() -> None:
    done = CliRunner().invoke(
        preflight_command,
        ["--json", "--gpus", "8", "--shared-memory", "1Ki", "--skip", "nccl", "--skip", "kernel"],
    )
    document = json.loads(done.stdout)
    assert done.exit_code == 1
    assert document["passed"] is False
    results = {one["name"]: one["result"] for one in document["checks"]}
    assert results["gpu-count"] == "failed"
    assert results["shared-memory"] == "passed"
    assert results["nccl"] == results["kernel"] == results["target"] == "skipped"
    assert "FAIL gpu-count" in done.stderr


def test_wrong_arguments_are_refused() -> None:
    done = CliRunner().invoke(preflight_command, ["--skip", "gpu-colour"])
    assert done.exit_code == 2
    assert "no check 'gpu-colour'" in done.stderr
    for words in (
        *(("--shared-memory", "lots"), ("--gpus", "0"), ("--memory-fraction", "1.5")),
        *(("--memory-fraction", "nan"), ("--kv-pool-tokens", "-1"), ("--nccl-timeout", "0")),
        ("--nccl-timeout", "inf"),
    ):
        done = CliRunner().invoke(preflight_command, words)
        assert done.exit_code == 2, words
        assert words[0] in done.stderr
    assert parse_bytes("32Gi") == 32 * GIB
