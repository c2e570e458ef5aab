"""NVML: power, clocks, memory and residency; and its GPM counters, where the GPU has them.

Needs the package nvidia-ml-py (extra ``gpu``) and the driver's library.
"""

import importlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from longleaf.exporters.source import LEAST_INTERVAL, Figures, SourceError

_MIB = 1 << 20
_DATA_RATE = 2.0
"""Transfers a clock cycle: NVML reports memory clocks of double data rate."""


def load_nvml() -> Any:
    """The module ``pynvml``, initialized; ``SourceError`` says what is missing."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise SourceError("nvidia-ml-py is not installed (pip install 'longleaf[gpu]')") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise SourceError(f"NVML: {error}") from error
    return nvml


class Nvml:
    """What every GPU tells."""

    name = "nvml"

    def __init__(self, load: Callable[[], Any] = load_nvml) -> None:
        self._load = load
        self._nvml: Any = None
        self._devices: dict[str, Any] = {}

    def open(self) -> Mapping[str, str]:
        """See ``Source``."""
        self._nvml = self._load()
        count = self._nvml.nvmlDeviceGetCount()
        if count == 0:
            raise SourceError("NVML: no GPU")
        self._devices = {
            str(index): self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)
        }
        return {metric: self._why_not(ask) for metric, ask in self._asks().items()}

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        """See ``Source``."""
        nvml = self._nvml
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        return {
            index: (_text(nvml.nvmlDeviceGetName(d)), _text(nvml.nvmlDeviceGetUUID(d)), driver)
            for index, d in self._devices.items()
        }

    def sample(self) -> Mapping[str, Figures]:
        """See ``Source``."""
        found: dict[str, dict[str, float]] = {index: {} for index in self._devices}
        for metric, ask in self._asks().items():
            for index, device in self._devices.items():
                with suppress(self._nvml.NVMLError):
                    found[index][metric] = ask(device)
        return found

    def close(self) -> None:
        """See ``Source``."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

    def _why_not(self, ask: Callable[[Any], float]) -> str:
        for index, device in self._devices.items():
            try:
                ask(device)
            except self._nvml.NVMLError as error:
                return f"GPU {index}: {error}"
        return ""

    def _asks(self) -> Mapping[str, Callable[[Any], float]]:
        n = self._nvml

        def peak(device: Any) -> float:
            clock = n.nvmlDeviceGetMaxClockInfo(device, n.NVML_CLOCK_MEM) * 1e6
            return float(clock * _DATA_RATE * n.nvmlDeviceGetMemoryBusWidth(device) / 8)

        return {
            "sm_resident_ratio": lambda d: n.nvmlDeviceGetUtilizationRates(d).gpu / 100,
            "power_watts": lambda d: n.nvmlDeviceGetPowerUsage(d) / 1e3,
            "power_limit_watts": lambda d: n.nvmlDeviceGetEnforcedPowerLimit(d) / 1e3,
            "sm_clock_hertz": lambda d: n.nvmlDeviceGetClockInfo(d, n.NVML_CLOCK_SM) * 1e6,
            "memory_clock_hertz": lambda d: n.nvmlDeviceGetClockInfo(d, n.NVML_CLOCK_MEM) * 1e6,
            "memory_used_bytes": lambda d: float(n.nvmlDeviceGetMemoryInfo(d).used),
            "memory_total_bytes": lambda d: float(n.nvmlDeviceGetMemoryInfo(d).total),
            "memory_peak_bytes_per_second": peak,
        }


class NvmlGpm:
    """GPM counters (Hopper and newer): a figure is the mean between two samples."""

    name = "nvml_gpm"

    def __init__(self, load: Callable[[], Any] = load_nvml) -> None:
        self._load = load
        self._nvml: Any = None
        self._devices: dict[str, Any] = {}
        self._samples: dict[str, tuple[Any, Any]] = {}
        self._taken = 0.0

    def open(self) -> Mapping[str, str]:
        """See ``Source``."""
        nvml = self._nvml = self._load()
        self._devices = {
            str(index): nvml.nvmlDeviceGetHandleByIndex(index)
            for index in range(nvml.nvmlDeviceGetCount())
        }
        for index, device in self._devices.items():
            try:
                supported = nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice
            except nvml.NVMLError as error:
                raise SourceError(f"GPU {index}: {error}") from error
            if not supported:
                raise SourceError(f"GPU {index} has no GPM counters")
        try:
            for index, device in self._devices.items():
                self._samples[index] = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
                nvml.nvmlGpmSampleGet(device, self._samples[index][0])
            self._taken = time.monotonic()
        except nvml.NVMLError as error:
            raise SourceError(f"GPM: {error}") from error
        found = self.sample()
        return {
            metric: "" if all(metric in figures for figures in found.values()) else "not counted"
            for metric, *_ in self._wanted()
        }

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        """See ``Source``."""
        return {}

    def sample(self) -> Mapping[str, Figures]:
        """See ``Source``."""
        nvml, wanted = self._nvml, self._wanted()
        time.sleep(max(0.0, self._taken + LEAST_INTERVAL - time.monotonic()))
        found: dict[str, dict[str, float]] = {}
        try:
            for index, device in self._devices.items():
                earlier, later = self._samples[index]
                nvml.nvmlGpmSampleGet(device, later)
                asked = nvml.c_nvmlGpmMetricsGet_t()
                asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
                asked.numMetrics = len(wanted)
                asked.sample1, asked.sample2 = earlier, later
                for place, (_, number, _) in enumerate(wanted):
                    asked.metrics[place].metricId = number
                nvml.nvmlGpmMetricsGet(asked)
                self._samples[index] = later, earlier
                found[index] = {
                    metric: asked.metrics[place].value * unit
                    for place, (metric, _, unit) in enumerate(wanted)
                    if asked.metrics[place].nvmlReturn == nvml.NVML_SUCCESS
                    and math.isfinite(asked.metrics[place].value)
                }
            self._taken = time.monotonic()
        except nvml.NVMLError as error:
            raise SourceError(f"GPM: {error}") from error
        return found

    def close(self) -> None:
        """See ``Source``."""
        if self._nvml is not None:
            for pair in self._samples.values():
                for sample in pair:
                    self._nvml.nvmlGpmSampleFree(sample)
            self._samples = {}
            self._nvml.nvmlShutdown()
            self._nvml = None

    def _wanted(self) -> tuple[tuple[str, int, float], ...]:
        """Metric, NVML's number of it, and its unit."""
        n = self._nvml
        return (
            ("tensor_active_ratio", n.NVML_GPM_METRIC_ANY_TENSOR_UTIL, 0.01),
            ("dram_active_ratio", n.NVML_GPM_METRIC_DRAM_BW_UTIL, 0.01),
            ("sm_active_ratio", n.NVML_GPM_METRIC_SM_UTIL, 0.01),
            ("pcie_receive_bytes_per_second", n.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _MIB),
            ("pcie_transmit_bytes_per_second", n.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _MIB),
        )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
