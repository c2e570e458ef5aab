"""NVML: power, clocks, memory and residency; and its GPM counters, where the GPU has them.

Needs the package nvidia-ml-py (extra ``gpu``) and the driver's library.
"""

import importlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from longleaf.exporters.source import LEAST_INTERVAL, Figures, SourceError

logger = logging.getLogger(__name__)
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


def find_devices(nvml: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Handles by index, and the GPUs that have none, for they are lost. ``SourceError`` if no GPU
    has one.
    """
    found: dict[str, Any] = {}
    lost: dict[str, str] = {}
    try:
        for index in map(str, range(nvml.nvmlDeviceGetCount())):
            try:
                found[index] = nvml.nvmlDeviceGetHandleByIndex(int(index))
            except nvml.NVMLError as error:
                lost[index] = f"GPU {index}: {error}"
    except nvml.NVMLError as error:
        raise SourceError(f"NVML: {error}") from error
    for why in lost.values():
        logger.warning("%s", why)
    if not found:
        raise SourceError(next(iter(lost.values()), "NVML: no GPU"))
    return found, frozenset(lost)


class Nvml:
    """What every GPU tells."""

    name = "nvml"

    def __init__(self, load: Callable[[], Any] = load_nvml) -> None:
        self._load = load
        self._nvml: Any = None
        self._devices: Mapping[str, Any] = {}
        self._lost: frozenset[str] = frozenset()

    def open(self) -> Mapping[str, str]:
        """See ``Source``."""
        self._nvml = self._load()
        self._devices, self._lost = find_devices(self._nvml)
        alive = [index for index, figures in self.sample().items() if figures]
        return {metric: self._why_not(ask, alive) for metric, ask in self._asks().items()}

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        """See ``Source``."""
        nvml = self._nvml
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        found = {}
        for index, device in self._devices.items():
            with suppress(nvml.NVMLError):
                name, uuid = nvml.nvmlDeviceGetName(device), nvml.nvmlDeviceGetUUID(device)
                found[index] = (_text(name), _text(uuid), driver)
        return found

    def sample(self) -> Mapping[str, Figures]:
        """See ``Source``."""
        found: dict[str, dict[str, float]] = {index: {} for index in self._lost}
        why = ""
        for index, device in self._devices.items():
            figures = found[index] = {}
            for metric, ask in self._asks().items():
                try:
                    figures[metric] = ask(device)
                except self._nvml.NVMLError as error:
                    why = f": GPU {index}: {error}"
        if not any(found.values()):
            raise SourceError(f"NVML tells nothing{why}")
        return found

    def close(self) -> None:
        """See ``Source``."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

    def _why_not(self, ask: Callable[[Any], float], alive: Sequence[str]) -> str:
        for index in alive:
            try:
                ask(self._devices[index])
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
        self._devices: Mapping[str, Any] = {}
        self._lost: frozenset[str] = frozenset()
        self._samples: dict[str, tuple[Any, Any]] = {}
        self._taken = 0.0

    def open(self) -> Mapping[str, str]:
        """See ``Source``."""
        nvml = self._nvml = self._load()
        self._devices, self._lost = find_devices(nvml)
        for index, device in self._devices.items():
            self._require_support(index, device)
        try:
            for index in self._devices:
                self._samples[index] = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        except nvml.NVMLError as error:
            raise SourceError(f"GPM: {error}") from error
        for index, device in self._devices.items():
            with suppress(nvml.NVMLError):
                nvml.nvmlGpmSampleGet(device, self._samples[index][0])
        self._taken = time.monotonic()
        found = self.sample()
        return {
            metric: ""
            if all(metric in figures for figures in found.values() if figures)
            else "not counted"
            for metric, *_ in self._wanted()
        }

    def _require_support(self, index: str, device: Any) -> None:
        try:
            supported = self._nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice
        except self._nvml.NVMLError as error:
            raise SourceError(f"GPU {index}: {error}") from error
        if not supported:
            raise SourceError(f"GPU {index} has no GPM counters")

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        """See ``Source``."""
        return {}

    def sample(self) -> Mapping[str, Figures]:
        """See ``Source``."""
        time.sleep(max(0.0, self._taken + LEAST_INTERVAL - time.monotonic()))
        found: dict[str, Figures] = {index: {} for index in self._lost}
        why = ""
        for index, device in self._devices.items():
            try:
                found[index] = self._sample_one(index, device)
            except self._nvml.NVMLError as error:
                found[index], why = {}, f"GPM: GPU {index}: {error}"
        self._taken = time.monotonic()
        if not any(found.values()):
            raise SourceError(why or "GPM: nothing is counted")
        return found

    def _sample_one(self, index: str, device: Any) -> Figures:
        nvml, wanted = self._nvml, self._wanted()
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
        return {
            metric: asked.metrics[place].value * unit
            for place, (metric, _, unit) in enumerate(wanted)
            if asked.metrics[place].nvmlReturn == nvml.NVML_SUCCESS
            and math.isfinite(asked.metrics[place].value)
        }

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
