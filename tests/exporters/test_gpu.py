"""The GPU exporter on what an H200 said under known loads, and on a fake NVML."""

import json
import logging
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from longleaf.exporters.dcgm import Dcgm, parse_dmon
from longleaf.exporters.gpu import WANTED_OF, GpuExporter
from longleaf.exporters.nvml import Nvml, NvmlGpm
from longleaf.exporters.recording import Recorder, load_recording, save_recording
from longleaf.exporters.source import SourceError
from longleaf.metrics import GPU_METRICS, GpuMetrics
from tests.exporters.signatures import FIGURES, SIGNATURES

RECORDINGS = Path(__file__).parent / "recordings"
H200 = Path(__file__).resolve().parents[2] / "ops" / "observe" / "recordings" / "h200"


class Exported:
    """An exporter of a recording, and what it publishes."""

    def __init__(self, recording: str, retry: float = 60.0) -> None:
        self.registry = CollectorRegistry()
        sources = load_recording(RECORDINGS / recording)
        self.samples = max(len(source.samples) for source in sources)
        self.exporter = GpuExporter(sources, GpuMetrics(self.registry), retry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"longleaf_gpu_{name}", labels)

    def supported(self, metric: str, source: str) -> float | None:
        return self.value("metric_supported", metric=metric, source=source)


def test_every_metric_has_a_source_that_is_for_it() -> None:
    assert {name for names in WANTED_OF.values() for name in names} == set(GPU_METRICS)


def figures_under(load: str) -> list[dict[str, float]]:
    """What is published while an H200 does that, sample by sample."""
    exported = Exported(str(H200 / f"{load}.json"))
    found = []
    for _ in range(exported.samples):
        exported.exporter.sample()
        values = {name: exported.value(name, gpu="0") for name in (*FIGURES, "power_watts")}
        found.append({name: value for name, value in values.items() if value is not None})
    assert len(found) > 10
    assert all(len(sample) == 5 for sample in found), "a figure is absent"
    return found


@pytest.mark.parametrize("load", SIGNATURES)
def test_each_load_has_its_signature_in_every_sample(load: str) -> None:
    for sample in figures_under(load):
        for name, (least, most) in zip(FIGURES, SIGNATURES[load], strict=True):
            assert least <= sample[name] <= most, (name, sample)


def test_utilization_cannot_tell_a_kernel_that_waits_from_one_that_works() -> None:
    """The trap: SGLang's verify keeps 8 of 132 SMs, and looks as busy as a kernel on all."""
    waits, works = figures_under("sglang-verify-64k"), figures_under("longleaf-verify-64k")
    for before, after in zip(waits[2:], works[2:], strict=False):
        assert abs(before["sm_resident_ratio"] - after["sm_resident_ratio"]) <= 0.02
        assert before["sm_active_ratio"] == pytest.approx(8 / 132, rel=0.15)
        assert after["dram_active_ratio"] > 200 * before["dram_active_ratio"]
        assert after["power_watts"] > 3 * before["power_watts"]


def test_the_card_is_described() -> None:
    exported = Exported(str(H200 / "idle.json"))
    exported.exporter.sample()
    assert exported.value("memory_peak_bytes_per_second", gpu="0") == pytest.approx(
        4.8e12, rel=0.01
    )
    assert exported.value("power_limit_watts", gpu="0") == 700
    assert exported.supported("tensor_active_ratio", "nvml_gpm") == 1
    assert exported.supported("tensor_active_ratio", "dcgm") == 0
    seconds = exported.value("sample_seconds")
    assert seconds is not None
    assert 0 < seconds < 1


class Counting:
    """A source whose opening and closing is counted; ``broken`` fails its next sample."""

    def __init__(self, name: str, *metrics: str) -> None:
        self.name, self.metrics = name, metrics
        self.opened = self.closed = 0
        self.broken = False

    def open(self) -> dict[str, str]:
        self.opened += 1
        return dict.fromkeys(self.metrics, "")

    def identify(self) -> dict[str, tuple[str, str, str]]:
        return {}

    def sample(self) -> dict[str, dict[str, float]]:
        if self.broken:
            self.broken = False
            raise SourceError("gone")
        return {"0": dict.fromkeys(self.metrics, 0.5 if self.name == "cupti_pm" else 0.25)}

    def close(self) -> None:
        self.closed += 1


def test_a_source_that_is_not_needed_is_not_opened() -> None:
    """Two that sample one GPU's counters at once disturbed each other on an H200."""
    first = Counting("nvml_gpm", *WANTED_OF["nvml_gpm"])
    second = Counting("cupti_pm", *WANTED_OF["cupti_pm"])
    registry = CollectorRegistry()
    exporter = GpuExporter([first, second], GpuMetrics(registry), retry=0.0)

    def tensor() -> float | None:
        return registry.get_sample_value("longleaf_gpu_tensor_active_ratio", {"gpu": "0"})

    exporter.sample()
    assert (tensor(), second.opened) == (0.25, 0)
    first.broken = True
    exporter.sample()
    assert (tensor(), second.opened, second.closed) == (0.5, 1, 0)
    exporter.sample()
    assert (tensor(), second.opened, second.closed) == (0.25, 1, 1)
    exporter.close()
    assert first.closed == first.opened == 2


def test_what_is_unknown_is_absent_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    exported = Exported("synthetic-no-counters.json")
    with caplog.at_level(logging.WARNING):
        exported.exporter.sample()
    text = generate_latest(exported.registry).decode()
    for name in ("tensor_active_ratio", "dram_active_ratio", "power_watts"):
        assert re.search(rf"^longleaf_gpu_{name}\{{", text, re.M) is None
    assert exported.supported("tensor_active_ratio", "nvml_gpm") == 0
    assert exported.supported("tensor_active_ratio", "dcgm") == 0
    assert exported.supported("power_watts", "nvml") == 0
    assert exported.value("sm_resident_ratio", gpu="0") == 0.97  # DCGM comes before NVML
    messages = [record.getMessage() for record in caplog.records]
    assert "nvml_gpm tells no metric: GPU 0 has no GPM counters" in messages
    assert "nvml tells no power_watts: GPU 0: Not Supported" in messages
    assert len(messages) == len(set(messages)) == 6


def test_a_source_that_is_lost_gives_way_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    exported = Exported("synthetic-no-counters.json", retry=0.0)
    exported.exporter.sample()
    assert exported.value("sm_resident_ratio", gpu="0") == 0.97
    exported.exporter.sample()
    assert "dcgm tells no metric: the host engine is gone" in caplog.messages
    assert exported.supported("sm_resident_ratio", "dcgm") == 0
    assert exported.value("sm_resident_ratio", gpu="0") == 0.99  # NVML's
    exported.exporter.sample()
    assert exported.supported("sm_resident_ratio", "dcgm") == 1
    assert exported.value("sm_resident_ratio", gpu="0") == 0.97
    exported.exporter.close()


def test_a_figure_that_a_sample_lacks_ends_its_series() -> None:
    class Source:
        name = "nvml"

        def __init__(self) -> None:
            both = {"0": {"power_watts": 90.0}, "1": {"power_watts": 95.0}}
            self.samples: list[Any] = [both, {"1": {}}]

        def open(self) -> dict[str, str]:
            return {"power_watts": ""}

        def identify(self) -> dict[str, tuple[str, str, str]]:
            return {}

        def sample(self) -> Any:
            return self.samples.pop(0)

        def close(self) -> None:
            pass

    registry = CollectorRegistry()
    exporter = GpuExporter([Source()], GpuMetrics(registry))
    exporter.sample()
    assert registry.get_sample_value("longleaf_gpu_power_watts", {"gpu": "1"}) == 95
    exporter.sample()
    assert b"longleaf_gpu_power_watts{" not in generate_latest(registry)


class FakeError(Exception):
    pass


class FakeNvml:
    """NVML of two GPUs, of which the second refuses to tell its power."""

    NVMLError = FakeError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_SUCCESS, NVML_GPM_METRICS_GET_VERSION = 1, 2, 0, 1
    NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 5, 10
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_PCIE_TX_PER_SEC, NVML_GPM_METRIC_PCIE_RX_PER_SEC = 20, 21

    def __init__(self, gpm: bool = True) -> None:
        self.gpm = gpm
        self.shut = 0
        self.allocated = 0
        self.taken = 0

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetName(self, device: int) -> str:
        return "Card"

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-{device}"

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        return SimpleNamespace(gpu=99)

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        if device == 1:
            raise FakeError("Not Supported")
        return 133_000

    def nvmlDeviceGetEnforcedPowerLimit(self, device: int) -> int:
        return 600_000

    def nvmlDeviceGetClockInfo(self, device: int, kind: int) -> int:
        return {1: 2400, 2: 14_001}[kind]

    def nvmlDeviceGetMaxClockInfo(self, device: int, kind: int) -> int:
        return 14_001

    def nvmlDeviceGetMemoryBusWidth(self, device: int) -> int:
        return 512

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return SimpleNamespace(used=5, total=10)

    def nvmlShutdown(self) -> None:
        self.shut += 1

    def nvmlGpmQueryDeviceSupport(self, device: int) -> Any:
        return SimpleNamespace(isSupportedDevice=self.gpm)

    def nvmlGpmSampleAlloc(self) -> Any:
        self.allocated += 1
        return SimpleNamespace(at=-1)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.allocated -= 1

    def nvmlGpmSampleGet(self, device: int, sample: Any) -> None:
        self.taken += 1
        sample.at = self.taken

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        metrics = [SimpleNamespace(metricId=0, value=0.0, nvmlReturn=0) for _ in range(8)]
        return SimpleNamespace(metrics=metrics)

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert asked.sample1.at < asked.sample2.at, "the earlier sample comes first"
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = {2: 6.0, 5: 3.0, 10: 1.2, 20: 100.0, 21: 200.0}[metric.metricId]
            metric.nvmlReturn = 3 if metric.metricId == 20 else 0


def test_nvml_figures_are_in_base_units() -> None:
    nvml = FakeNvml()
    source = Nvml(lambda: nvml)
    supported = source.open()
    assert supported["power_watts"] == "GPU 1: Not Supported"
    assert not supported["sm_resident_ratio"]
    first, second = source.sample()["0"], source.sample()["1"]
    assert first["power_watts"] == 133
    assert "power_watts" not in second
    assert first["sm_resident_ratio"] == 0.99
    assert first["sm_clock_hertz"] == 2.4e9
    # 28 Gbit/s a pin, 512 of them: the maker says 1,792 GB/s
    assert first["memory_peak_bytes_per_second"] == pytest.approx(1.792e12, rel=1e-3)
    assert source.identify()["1"] == ("Card", "GPU-1", "580.1")
    source.close()
    assert nvml.shut == 1


def test_gpm_counts_between_two_samples_and_keeps_no_memory() -> None:
    nvml = FakeNvml()
    source = NvmlGpm(lambda: nvml)
    supported = source.open()
    assert supported["pcie_transmit_bytes_per_second"] == "not counted"
    for _ in range(3):
        figures = source.sample()["1"]
    assert figures["tensor_active_ratio"] == pytest.approx(0.03)
    assert figures["dram_active_ratio"] == pytest.approx(0.012)
    assert figures["sm_active_ratio"] == pytest.approx(0.06)
    assert figures["pcie_receive_bytes_per_second"] == 200 * 2**20
    assert nvml.allocated == 4
    source.close()
    assert nvml.allocated == 0
    with pytest.raises(SourceError, match="GPU 0 has no GPM counters"):
        NvmlGpm(lambda: FakeNvml(gpm=False)).open()


DMON = """\
#Entity   TENSO        DRAMA        SMACT        GRACT        PCITX        PCIRX
ID
GPU 1     N/A          N/A          N/A          0.500        N/A          N/A
GPU 0     N/A          N/A          N/A          0.500        N/A          N/A
GPU 1     0.031        0.012        0.060        0.998        1000         N/A
GPU 0     N/A          0.500        0.090        0.100        2000         3000
"""


def test_dcgm_is_read_as_it_prints() -> None:
    figures = Dcgm(lambda _: DMON).sample()
    assert figures["1"]["tensor_active_ratio"] == 0.031
    assert "pcie_receive_bytes_per_second" not in figures["1"]
    assert figures["0"]["pcie_transmit_bytes_per_second"] == 2000
    assert Dcgm(lambda _: DMON).open()["tensor_active_ratio"] == "N/A"
    assert parse_dmon("GPU 0 1\n", ["a", "b"]) == {}
    with pytest.raises(SourceError, match="no GPU"):
        Dcgm(lambda _: "#Entity\n").open()


def test_a_recording_replays_what_was_recorded(tmp_path: Path) -> None:
    sources = load_recording(RECORDINGS / "synthetic-no-counters.json")
    recorders = [Recorder(source) for source in sources]
    exporter = GpuExporter(recorders, GpuMetrics(CollectorRegistry()))
    for _ in range(2):
        exporter.sample()
    path = tmp_path / "again.json"
    save_recording(path, recorders, "again")
    first = json.loads((RECORDINGS / "synthetic-no-counters.json").read_text())["sources"]
    again = json.loads(path.read_text())["sources"]
    assert again[0] == {**first[0], "samples": []}
    assert again[1]["samples"] == first[1]["samples"][:2]
    assert again[2]["gpus"] == first[2]["gpus"]


def test_the_command_serves_a_recording_and_ends_on_a_signal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "longleaf", "exporter", "gpu", "--port", str(port)]
    recording = str(H200 / "copy.json")
    refused = subprocess.run(
        [*command, "--interval", "0.05"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "0.1" in refused.stderr
    with subprocess.Popen(
        [*command, "--replay", recording, "--interval", "0.1"], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().decode().strip()
            deadline = time.monotonic() + 30
            text = ""
            while "longleaf_gpu_tensor_active_ratio" not in text:
                assert time.monotonic() < deadline
                with urllib.request.urlopen(url, timeout=10) as answer:
                    text = answer.read().decode()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
