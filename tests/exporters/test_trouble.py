"""The GPU exporter where something is wrong: nothing old, unknown or lost is published as live."""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from longleaf.exporters.command import exporter_command
from longleaf.exporters.gpu import GpuExporter
from longleaf.exporters.nvml import Nvml, NvmlGpm
from longleaf.exporters.recording import Recorder, load_recording, save_recording
from longleaf.exporters.source import Source, SourceError
from longleaf.metrics import GPU_METRICS, GpuFigures, GpuMetrics
from tests.exporters.test_gpu import H200, FakeError, FakeNvml

LIMIT = 30.0
Sample = Mapping[str, Mapping[str, float]]


class Scripted:
    """An NVML that tells power and residency as the script says, an answer a sample."""

    name = "nvml"

    def __init__(self, *samples: Sample | Exception | Callable[[], Sample]) -> None:
        self._samples = list(samples)

    def open(self) -> Mapping[str, str]:
        return {"power_watts": "", "sm_resident_ratio": ""}

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        return {}

    def sample(self) -> Sample:
        found = self._samples.pop(0)
        if isinstance(found, Exception):
            raise found
        return found() if callable(found) else found

    def close(self) -> None:
        raise FakeError("what is lost cannot be closed")


class Published:
    """What an exporter of some sources publishes."""

    def __init__(self, *sources: Source, expiry: float = 15.0) -> None:
        self.registry = CollectorRegistry()
        self.exporter = GpuExporter(sources, GpuMetrics(self.registry, expiry), retry=0.0)

    def value(self, name: str, gpu: str = "0") -> float | None:
        return self.registry.get_sample_value(f"longleaf_gpu_{name}", {"gpu": gpu})

    def supported(self, metric: str, source: str = "nvml") -> float | None:
        labels = {"metric": metric, "source": source}
        return self.registry.get_sample_value("longleaf_gpu_metric_supported", labels)


BOTH = {"power_watts": 300.0, "sm_resident_ratio": 0.99}


@pytest.mark.parametrize("unknown", [float("nan"), float("inf")])
def test_what_is_no_number_is_absent(unknown: float) -> None:
    published = Published(Scripted({"0": {**BOTH, "power_watts": unknown}}))
    published.exporter.sample()
    assert published.value("power_watts") is None
    assert published.supported("power_watts") == 0
    assert published.value("sm_resident_ratio") == 0.99
    assert published.supported("sm_resident_ratio") == 1


@pytest.mark.parametrize(
    ("told", "published"), [(3.09, None), (-0.01, None), (1.06, None), (1.004, 1.0), (0.99, 0.99)]
)
def test_a_share_is_one(told: float, published: float | None) -> None:
    """309 % of the tensor pipes, as a source of ours once told of an H200."""
    exporter = Published(Scripted({"0": {**BOTH, "sm_resident_ratio": told}}))
    exporter.exporter.sample()
    assert exporter.value("sm_resident_ratio") == published
    assert exporter.supported("sm_resident_ratio") == (published is not None)
    assert exporter.value("power_watts") == 300


def test_a_figure_that_is_lost_later_is_unsupported_until_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    without = {"sm_resident_ratio": 0.5}
    published = Published(
        Scripted({"0": BOTH, "1": BOTH}, *[{"0": BOTH, "1": without}] * 2, {"0": BOTH, "1": BOTH})
    )
    seen = []
    for _ in range(4):
        published.exporter.sample()
        seen.append((published.supported("power_watts"), published.value("power_watts", "1")))
    assert seen == [(1, 300), (0, None), (0, None), (1, 300)]
    assert published.value("power_watts", "0") == 300
    assert caplog.messages == ["nvml tells no power_watts: GPU 1: no longer told"]


def test_a_gpu_that_tells_nothing_any_more_is_down_and_spoils_no_other() -> None:
    published = Published(Scripted({"0": BOTH, "1": BOTH}, {"0": BOTH, "1": {}}))
    published.exporter.sample()
    assert [published.value("up", gpu) for gpu in "01"] == [1, 1]
    published.exporter.sample()
    assert [published.value("up", gpu) for gpu in "01"] == [1, 0]
    assert [published.value("power_watts", gpu) for gpu in "01"] == [300, None]
    assert published.supported("power_watts") == 1


@pytest.mark.parametrize("error", [SourceError("gone"), OSError("gone"), FakeError("gone")])
def test_no_error_of_a_source_ends_the_exporter(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    published = Published(Scripted({"0": BOTH}, error, {"0": BOTH}))
    published.exporter.sample()
    published.exporter.sample()
    assert published.value("power_watts") is None
    assert published.supported("power_watts") == 0
    kind = "" if isinstance(error, SourceError) else f"{type(error).__name__}: "
    assert caplog.messages == [f"nvml tells no metric: {kind}gone"]
    published.exporter.sample()
    assert published.value("power_watts") == 300
    published.exporter.close()


def test_metrics_that_no_asked_source_is_for_are_said_to_be_unsupported() -> None:
    published = Published(Scripted())
    for metric in ("tensor_active_ratio", "dram_active_ratio"):
        assert published.supported(metric, "none") == 0
    assert published.supported("power_watts", "none") is None


def test_figures_of_a_source_that_hangs_expire() -> None:
    released = threading.Event()

    def hang() -> Sample:
        released.wait(LIMIT)
        return {"0": BOTH}

    published = Published(Scripted({"0": BOTH}, hang), expiry=0.5)
    published.exporter.sample()
    sampled = published.registry.get_sample_value("longleaf_gpu_sample_timestamp_seconds")
    thread = threading.Thread(target=published.exporter.sample)
    thread.start()
    deadline = time.monotonic() + LIMIT
    while published.value("power_watts") is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert published.value("up") is None
    stamp = published.registry.get_sample_value("longleaf_gpu_sample_timestamp_seconds")
    assert stamp == sampled, "its age is what an alert sees"
    released.set()
    thread.join()
    assert published.value("power_watts") == 300


def test_figures_hold_until_they_expire() -> None:
    now = [100.0]
    registry = CollectorRegistry()
    figures = GpuFigures(15.0, lambda: now[0])
    registry.register(figures)
    assert registry.get_sample_value("longleaf_gpu_power_watts", {"gpu": "0"}) is None
    figures.set({"power_watts": {"0": 300.0}}, {"0": True})
    for at, value in ((114.9, 300.0), (115.1, None)):
        now[0] = at
        assert registry.get_sample_value("longleaf_gpu_power_watts", {"gpu": "0"}) == value
    names = {family.name for family in registry.collect()}
    assert names == {f"longleaf_gpu_{name}" for name in (*GPU_METRICS, "up")}


class LostGpu(FakeNvml):
    """Of two GPUs the second is lost: from the start, or once ``lost`` is set."""

    def __init__(self, from_start: bool) -> None:
        super().__init__()
        self.from_start = self.lost = from_start

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1 and self.from_start:
            raise FakeError("GPU is lost")
        return index

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        self._require(device)
        return super().nvmlDeviceGetUtilizationRates(device)

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        self._require(device)
        return 133_000

    def nvmlDeviceGetEnforcedPowerLimit(self, device: int) -> int:
        self._require(device)
        return 600_000

    def nvmlDeviceGetClockInfo(self, device: int, kind: int) -> int:
        self._require(device)
        return super().nvmlDeviceGetClockInfo(device, kind)

    def nvmlDeviceGetMaxClockInfo(self, device: int, kind: int) -> int:
        self._require(device)
        return super().nvmlDeviceGetMaxClockInfo(device, kind)

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        self._require(device)
        return super().nvmlDeviceGetMemoryInfo(device)

    def nvmlGpmSampleGet(self, device: int, sample: Any) -> None:
        self._require(device)
        super().nvmlGpmSampleGet(device, sample)

    def _require(self, device: int) -> None:
        if device == 1 and self.lost:
            raise FakeError("GPU is lost")


@pytest.mark.parametrize("from_start", [True, False])
def test_of_two_gpus_the_one_that_is_left_goes_on(from_start: bool) -> None:
    nvml = LostGpu(from_start)
    published = Published(NvmlGpm(lambda: nvml), Nvml(lambda: nvml))
    published.exporter.sample()
    nvml.lost = True
    published.exporter.sample()
    assert [published.value("up", gpu) for gpu in "01"] == [1, 0]
    assert published.value("power_watts", "0") == 133
    assert published.value("tensor_active_ratio", "0") == pytest.approx(0.03)
    for metric in ("power_watts", "tensor_active_ratio"):
        assert published.value(metric, "1") is None
    assert published.supported("tensor_active_ratio", "nvml_gpm") == 1
    published.exporter.close()
    assert nvml.allocated == 0


def test_the_only_gpu_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    class Alone(LostGpu):
        def nvmlDeviceGetCount(self) -> int:
            return 1

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            raise FakeError("GPU is lost")

    published = Published(*(make(lambda: Alone(True)) for make in (NvmlGpm, Nvml)))
    with caplog.at_level(logging.WARNING):
        published.exporter.sample()
    assert "nvml tells no metric: GPU 0: GPU is lost" in caplog.messages
    assert published.supported("power_watts") == 0
    assert published.supported("tensor_active_ratio", "nvml_gpm") == 0


def test_a_source_that_cannot_count_its_gpus_says_so() -> None:
    class Countless(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:
            raise FakeError("driver mismatch")

    for make in (Nvml, NvmlGpm):
        with pytest.raises(SourceError, match="NVML: driver mismatch"):
            make(Countless).open()


def test_a_source_that_was_lost_and_stays_away_replays_so(tmp_path: Path) -> None:
    class Leaving(Scripted):
        opened = 0

        def open(self) -> Mapping[str, str]:
            self.opened += 1
            if self.opened > 1:
                raise SourceError("still gone")
            return super().open()

    recorder = Recorder(Leaving({"0": BOTH}, SourceError("gone")))
    recorded = Published(recorder)
    for _ in range(3):
        recorded.exporter.sample()
    path = tmp_path / "recording.json"
    save_recording(path, [recorder], "")
    again = Published(*load_recording(path))
    again.exporter.sample()
    assert again.value("power_watts") == 300
    again.exporter.sample()
    assert again.value("power_watts") is None


SOURCE = {"source": "nvml", "supported": {"power_watts": ""}}


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ("not JSON", "no recording: Invalid JSON"),
        ("[]", "no recording: Input should be an object"),
        ("{}", "no recording: sources: Field required"),
        (json.dumps({"sources": [{}]}), "sources.0.source: Field required"),
        (json.dumps({"sources": [{"source": "sensors"}]}), "sources.0.source: Input should be"),
        (json.dumps({"sources": [{**SOURCE, "samples": [1]}]}), "sources.0.samples.0"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, document: str, why: str) -> None:
    path = tmp_path / "recording.json"
    path.write_text(document)
    done = CliRunner().invoke(exporter_command, ["gpu", "--replay", str(path)])
    assert done.exit_code == 2
    assert why in " ".join(done.output.split())


def test_a_source_that_was_not_asked_says_so_when_replayed(tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    path.write_text(json.dumps({"sources": [{"source": "dcgm", "samples": []}]}))
    (source,) = load_recording(path)
    with pytest.raises(SourceError, match="no sample of it was recorded"):
        source.open()


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (("--record", "no/such/folder/a.json"), 2, "No such file or directory"),
        (("--host", "300.1.1.1"), 1, "--host 300.1.1.1 --port 9400: "),
        (("--interval", "61"), 2, "0.1<=x<=60.0"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(
    options: tuple[str, ...], code: int, why: str
) -> None:
    command = ["gpu", "--replay", str(H200 / "idle.json"), *options]
    done = CliRunner().invoke(exporter_command, command)
    assert done.exit_code == code
    assert why in done.output
