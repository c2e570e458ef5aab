"""CUPTI's PM sampling: the same counters on GPUs that have neither GPM nor DCGM.

Optional: needs CUPTI 13 and the right to read performance counters.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from longleaf.exporters._cupti import Cupti, DeviceSampler, count_devices, find_library
from longleaf.exporters.source import LEAST_INTERVAL, Figures, SourceError

ELAPSED = "gr__cycles_elapsed.max"
CYCLES: Mapping[str, str] = {
    "tensor_active_ratio": "sm__pipe_tensor_cycles_active.avg",
    "sm_active_ratio": "sm__cycles_active.avg",
    "sm_resident_ratio": "gr__cycles_active.avg",
}
"""Cycles that are a share of ``ELAPSED``."""
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
COUNTERS: Sequence[str] = (ELAPSED, DRAM, *CYCLES.values())
"""What is counted, in one pass (each chip's plan is CUPTI's)."""


class Sampler(Protocol):
    """One GPU that counts ``COUNTERS``."""

    def samples(self) -> Sequence[Sequence[float]]:
        """Values of each interval since the last call."""

    def close(self) -> None:
        """Stop counting."""


def open_samplers() -> Mapping[str, Sampler]:
    """A sampler for each GPU, by index. ``SourceError`` says why not."""
    cupti = Cupti(find_library())
    devices = count_devices()
    cupti.initialize()
    found: dict[str, Sampler] = {}
    try:
        for index in range(devices):
            found[str(index)] = DeviceSampler(cupti, index, COUNTERS)
    except SourceError:
        _close(found)
        raise
    return found


def ratios(samples: Sequence[Sequence[float]]) -> dict[str, float]:
    """Figures over all intervals together; what was not counted is left out."""
    sums = dict(zip(COUNTERS, map(math.fsum, zip(*samples, strict=True)), strict=False))
    elapsed = sums.get(ELAPSED, 0.0)
    if not elapsed > 0:
        return {}
    found = {metric: sums[counter] / elapsed for metric, counter in CYCLES.items()}
    found["dram_active_ratio"] = sums[DRAM] / len(samples) / 100
    return {metric: value for metric, value in found.items() if math.isfinite(value)}


class CuptiPm:
    """Means of the intervals between two samples."""

    name = "cupti_pm"

    def __init__(self, load: Callable[[], Mapping[str, Sampler]] = open_samplers) -> None:
        self._load = load
        self._samplers: Mapping[str, Sampler] = {}

    def open(self) -> Mapping[str, str]:
        """See ``Source``."""
        self._samplers = self._load()
        time.sleep(LEAST_INTERVAL)
        found = self.sample()
        return {
            metric: "" if all(metric in figures for figures in found.values()) else "not counted"
            for metric in (*CYCLES, "dram_active_ratio")
        }

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        """See ``Source``."""
        return {}

    def sample(self) -> Mapping[str, Figures]:
        """See ``Source``."""
        return {gpu: ratios(sampler.samples()) for gpu, sampler in self._samplers.items()}

    def close(self) -> None:
        """See ``Source``."""
        _close(self._samplers)
        self._samplers = {}


def _close(samplers: Mapping[str, Sampler]) -> None:
    for sampler in samplers.values():
        with suppress(SourceError):
            sampler.close()
