"""CUPTI's PM sampling: the same counters on GPUs that have neither GPM nor DCGM.

Optional: needs CUPTI 13 and the right to read performance counters.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Protocol

from longleaf.exporters._cupti import Cupti, DeviceSampler, count_devices, find_library
from longleaf.exporters.source import LEAST_INTERVAL, Figures, SourceError

logger = logging.getLogger(__name__)
_WAIT = 1.0
"""Seconds for which a sample waits for the end of a counting interval, far more than it lasts."""

COUNTERS: Mapping[str, str] = {
    "tensor_active_ratio": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram_active_ratio": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_active_ratio": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
}
"""What is counted, in one pass. Percent of what the unit can: cycles of a pipe that each SM has
four of, over those of ``gr__cycles_elapsed``, which is another clock, came to 309 % on an H200;
over four times those of ``sm__cycles_active`` they agreed with GPM to one part in a thousand.
"""


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
            found[str(index)] = DeviceSampler(cupti, index, tuple(COUNTERS.values()))
    except SourceError:
        _close(found)
        raise
    return found


def ratios(samples: Sequence[Sequence[float]]) -> dict[str, float]:
    """Means over intervals of one length; what was not counted is left out."""
    if not samples:
        return {}
    means = (fmean(column) / 100 for column in zip(*samples, strict=True))
    found = dict(zip(COUNTERS, means, strict=True))
    return {metric: value for metric, value in found.items() if math.isfinite(value)}


class CuptiPm:
    """Means of the intervals between two samples.

    What cannot be decoded is counted anew at once; ``SourceError`` if that fails too.
    """

    name = "cupti_pm"

    def __init__(
        self, load: Callable[[], Mapping[str, Sampler]] = open_samplers, wait: float = _WAIT
    ) -> None:
        self._load = load
        self._wait = wait
        self._samplers: Mapping[str, Sampler] = {}
        self._said = ""

    def open(self) -> Mapping[str, str]:
        """See ``Source``."""
        self._samplers = self._load()
        found = self.sample()
        return {
            metric: "" if all(metric in figures for figures in found.values()) else "not counted"
            for metric in COUNTERS
        }

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        """See ``Source``."""
        return {}

    def sample(self) -> Mapping[str, Figures]:
        """See ``Source``."""
        try:
            return self._read()
        except SourceError as error:
            if str(error) != self._said:
                logger.warning("%s counts anew: %s", self.name, error)
            self._said = str(error)
        self.close()
        self._samplers = self._load()
        return self._read()

    def _read(self) -> Mapping[str, Figures]:
        """Figures of each GPU, as soon as it has any; ``SourceError`` if none has."""
        deadline = time.monotonic() + self._wait
        found: dict[str, Figures] = {}
        while True:
            for gpu, sampler in self._samplers.items():
                if not found.get(gpu):
                    found[gpu] = ratios(sampler.samples())
            if all(found.values()):
                return found
            if time.monotonic() > deadline:
                break
            time.sleep(LEAST_INTERVAL / 4)
        if not any(found.values()):
            raise SourceError(f"CUPTI: nothing was counted in {self._wait:g} s")
        return found

    def close(self) -> None:
        """See ``Source``."""
        _close(self._samplers)
        self._samplers = {}


def _close(samplers: Mapping[str, Sampler]) -> None:
    for sampler in samplers.values():
        with suppress(SourceError):
            sampler.close()
