"""The GPU probe: what bounds a phase, and a real engine beside an exporter made for the test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from longleaf.probes.bounds import Gpu, Phase
from longleaf.probes.gpu import GpuPlan, GpuRun
from ops.observe.replay import replaying
from tests.gateway.engine import running_engine
from tests.probes.interrupt import interrupted

FIGURES = ("tensor_active_ratio", "dram_active_ratio", "sm_resident_ratio", "power_watts")


def gpu(*values: float | None) -> Gpu:
    named = zip(FIGURES, values, strict=True)
    return Gpu({metric: [value] for metric, value in named if value is not None})


def phase(name: str, *values: float | None) -> Phase:
    return Phase(name, {"0": gpu(*values)})


IDLE, MEMORY = (0.0, 0.0, 0.0, 75.0), (0.03, 0.9, 1.0, 340.0)
LATENCY = (0.03, 0.012, 0.998, 133.0)


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        ((0.0, 0.0, 0.01, 75.0), "idle"),
        ((0.85, 0.3, 1.0, 690.0), "compute"),
        ((0.02, 0.8, 1.0, 340.0), "memory"),
        ((0.6, 0.7, 1.0, 600.0), "compute and memory"),
        ((0.03, 0.012, 0.998, 133.0), "latency"),  # as seen, and taken for a busy GPU
        ((0.385, 0.365, 1.0, 693.0), "mixed"),  # this project's verify on an H200
        ((None, 0.012, 0.998, 133.0), "unknown"),  # what is unknown is not 0
        ((None, 0.8, 0.998, 133.0), "memory"),
    ],
)
def test_what_bounds_a_phase(values: tuple[float | None, ...], bound: str) -> None:
    assert gpu(*values).bound == bound


def test_what_fails_and_how_it_is_said() -> None:
    run = GpuRun(GpuPlan("u", "e", 1024), partial=False)
    run.phases = [
        phase("idle", 0.0, 0.0, 0.0, 75.0),
        phase("prefill", 0.8, 0.3, 1.0, 600.0),
        phase("decode", 0.03, 0.012, 0.998, 133.0),
    ]
    assert run.faults() == ["decode is latency-bound"]
    waits = "too few blocks, launches, or waiting for other GPUs"
    assert f"neither tensor pipes nor memory work: {waits} (GPU 0; tensor" in run.words()
    assert "memory 1.2 %, SMs with work unknown, resident 99.8 %, power 133.0 W)" in run.words()
    run.phases[2] = phase("decode", 0.03, 0.7, 0.998, 300.0)
    assert run.faults() == []
    assert run.document()["passed"] is True
    run.phases[0] = phase("idle", 0.0, 0.6, 1.0, 300.0)
    assert "not idle before" in run.faults()[0]


@pytest.mark.parametrize(
    ("gpus", "bounds", "fault"),
    [
        ([MEMORY, *[IDLE] * 7], ["memory"], None),  # 11 % in the mean
        ([MEMORY, MEMORY], ["memory"], None),
        ([MEMORY, LATENCY], ["memory", "latency"], "decode is latency-bound"),
        ([IDLE] * 8, ["idle"], "decode leaves every GPU idle"),
        ([MEMORY, (None, None, 1.0, 90.0)], ["memory", "unknown"], "decode cannot be told"),
        ([], ["unknown"], "decode cannot be told"),
    ],
)
def test_each_gpu_is_judged(
    gpus: list[tuple[float | None, ...]], bounds: list[str], fault: str | None
) -> None:
    decode = Phase("decode", {str(number): gpu(*values) for number, values in enumerate(gpus)})
    assert decode.bounds == bounds
    run = GpuRun(GpuPlan("u", "e", 1024), [phase("idle", *IDLE), decode], partial=False)
    assert run.passed is (fault is None)
    assert [found.startswith(str(fault)) for found in run.faults()] == [True] * bool(fault)
    assert len(run.table()) == 2 + len(gpus)


def test_the_words_name_each_gpu() -> None:
    decode = Phase("decode", {"0": gpu(*MEMORY), "1": gpu(*IDLE), "2": gpu(*IDLE)})
    assert "memory-bound, device memory is busy (GPU 0; tensor pipes 3.0 %" in decode.words()
    assert "idle, no kernel is there most of the time (GPU 1, 2; of 1: tensor" in decode.words()


@pytest.mark.parametrize(
    ("tensor", "dram", "filled", "resident", "why"),
    [
        # Real SGLang on an H200, 61 layers and 16k: its Triton verify, this project's, its prefill.
        (0.006, 0.003, 0.060, 0.997, "work: of the SMs 6% have work, so kernels have too few bloc"),
        (
            0.040,
            0.053,
            0.367,
            1.000,
            "work: of the SMs 37% have work, so kernels are short or smal",
        ),
        (
            0.104,
            0.014,
            0.798,
            0.967,
            "work: of the SMs 80% have work, so it is their work that wai",
        ),
        (0.152, 0.038, 0.367, 0.547, "for a part of the time, and 45% of the time no kernel is th"),
    ],
)
def test_what_it_waits_for(
    tensor: float, dram: float, filled: float, resident: float, why: str
) -> None:
    found = gpu(tensor, dram, resident, 200.0)
    found.samples["sm_active_ratio"] = [filled]
    assert why in found.meaning()
    assert f"SMs with work {filled:.1%}".replace("%", " %") in found.figures()


def test_a_step_is_held_to_what_its_memory_would_take() -> None:
    decode = phase("decode", 0.04, 0.0525, 1.0, 218.0)
    assert "A step" not in decode.words()
    decode.steps = [5.46e-3, 5.48e-3]
    assert decode.words().endswith("A step takes 5.47 ms.")
    decode.gpus["0"].samples["memory_peak_bytes_per_second"] = [4.814304e12]
    assert decode.words().endswith(
        "A step takes 5.47 ms; what it moves of device memory, 1.38 GB, takes 0.29 ms at the "
        "card's peak."
    )
    # An exporter on another machine tells nothing of these steps.
    elsewhere = phase("decode", *IDLE)
    elsewhere.steps = decode.steps
    elsewhere.gpus["0"].samples["memory_peak_bytes_per_second"] = [4.814304e12]
    assert elsewhere.words().endswith("A step takes 5.47 ms.")


def test_samples_that_an_exporter_does_not_give_are_lost_and_told() -> None:
    gone = Phase("decode", lost=["http://e: no answer in 10 s"] * 3)
    run = GpuRun(GpuPlan("u", "e", 1024), [phase("idle", *IDLE), gone], partial=False)
    assert run.faults() == ["decode cannot be told: http://e: no answer in 10 s"]
    assert "decode: no sample (http://e: no answer in 10 s)." in run.words()
    gone.take({"0": dict(zip(FIGURES, MEMORY, strict=True))})
    assert run.faults() == []
    assert "Samples lost: 3 (http://e: no answer in 10 s)." in run.words()
    assert run.document()["phases"][1]["lost_samples"] == gone.lost


def test_an_exporter_may_start_anew_meanwhile(tmp_path: Path) -> None:
    """It is there at first, gone when the phases begin, and there again before they end."""
    exposition, path = tmp_path / "gpu.prom", tmp_path / "gpu.json"
    text = "".join(
        f'longleaf_gpu_{metric}{{gpu="0"}} {value}\n'
        for metric, value in zip(FIGURES, MEMORY, strict=True)
    )
    exposition.write_text(text)
    with running_engine("--context-length", "2048") as engine, replaying(exposition) as port:
        command = [
            *(sys.executable, "-m", "longleaf", "probe", "gpu", "--url", engine.url),
            *("--context", "256", "--seconds", "1", "--settle", "0.5", "--interval", "0.1"),
            *("--max-tokens", "16", "--json", str(path)),
            *("--gpu-metrics-url", f"http://127.0.0.1:{port}/metrics"),
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert "idle" in process.stderr.readline()
            exposition.write_text("")
            assert "prefill" in process.stderr.readline()
            exposition.write_text(text)
            assert process.wait(timeout=120) == 1
    idle, prefill, decode = json.loads(path.read_text())["phases"]
    assert idle["lost_samples"] == []
    assert "tells nothing of a GPU" in prefill["lost_samples"][-1]
    assert decode["bounds"] == ["memory"]


def test_a_run_beside_an_exporter(tmp_path: Path) -> None:
    exposition = tmp_path / "gpu.prom"
    exposition.write_text(
        "".join(
            f'longleaf_gpu_{metric}{{gpu="{gpu}"}} {value}\n'
            for metric, value in zip(FIGURES, (0.03, 0.012, 0.998, 133), strict=True)
            for gpu in (0, 1)
        )
    )
    path, page = tmp_path / "gpu.json", tmp_path / "gpu.html"
    with running_engine("--context-length", "2048") as engine, replaying(exposition) as port:
        command = [
            *(sys.executable, "-m", "longleaf", "probe", "gpu", "--url", engine.url),
            *("--context", "256", "--seconds", "0.5", "--settle", "0", "--interval", "0.1"),
            *("--max-tokens", "16"),
        ]
        outputs = ("--json", str(path), "--html", str(page))
        exporter = ("--gpu-metrics-url", f"http://127.0.0.1:{port}/metrics")
        done = subprocess.run(
            [*command, *outputs, *exporter],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        no_exporter = ("--gpu-metrics-url", f"{engine.url}/metrics")
        wrong = subprocess.run(
            [*command, *no_exporter], capture_output=True, text=True, check=False, timeout=120
        )
    assert done.returncode == 1, done.stderr
    found = json.loads(path.read_text())
    assert [item["name"] for item in found["phases"]] == ["idle", "prefill", "decode"]
    idle, prefill, decode = (item["step_seconds"] for item in found["phases"])
    assert idle is prefill is None
    assert 0 < decode < 1
    for item in found["phases"]:
        assert list(item["gpus"]) == ["0", "1"]
        for each in item["gpus"].values():
            assert each["bound"] == "latency"
            assert len(each["samples"]["power_watts"]) >= 1
            assert each["means"]["power_watts"] == 133
    assert "decode is latency-bound" in done.stdout
    assert page.read_text().count("<rect") == 18
    assert wrong.returncode == 1
    assert "is it a GPU exporter?" in wrong.stderr


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    path, exposition = tmp_path / "gpu.json", tmp_path / "gpu.prom"
    exposition.write_text('longleaf_gpu_power_watts{gpu="0"} 80\n')
    with running_engine("--context-length", "2048") as engine, replaying(exposition) as port:
        code, out = interrupted(
            *(1, "probe", "gpu", "--url", engine.url, "--context", "256", "--seconds", "1"),
            *("--settle", "0", "--interval", "0.1", "--json", str(path)),
            *("--gpu-metrics-url", f"http://127.0.0.1:{port}/metrics"),
        )
    found = json.loads(path.read_text())
    assert code == 130
    assert out.rstrip().endswith("Interrupted.")
    assert (found["partial"], found["passed"]) == (True, False)
    assert found["phases"][0]["name"] == "idle"
    assert found["phases"][0]["gpus"]["0"]["means"] == {"power_watts": 80.0}
