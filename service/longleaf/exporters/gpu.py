"""The GPU exporter: of each metric the first source that has it, and nothing where none has."""

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from longleaf.exporters.source import Figures, Source, SourceError
from longleaf.metrics import GPU_METRICS, GpuMetrics

logger = logging.getLogger(__name__)
_SHARE = "_ratio"
_MOST_SHARE = 1.05
"""Counters of one interval are not read at one moment. Beyond that it is another unit."""


class GpuExporter:
    """Probes ``sources`` in order, then samples those that are of use.

    A figure that a sample lacks ends its series: what is unknown is absent, never 0 and never the
    value of some time ago. A source that fails, in whatever way, is closed, and tried again after
    ``retry`` seconds; one that the sources before it make needless is not opened. A GPU of which
    no source tells anything any more is said to be down.
    """

    def __init__(self, sources: Sequence[Source], metrics: GpuMetrics, retry: float = 60.0) -> None:
        self._sources = sources
        self._metrics = metrics
        self._retry = retry
        self._opened: dict[str, set[str]] = {}
        self._tried: dict[str, float] = {}
        self._said: set[tuple[str, str]] = set()
        self._gpus: set[str] = set()
        wanted = {name for source in sources for name in WANTED_OF[source.name]}
        for name in set(GPU_METRICS) - wanted:
            metrics.supported.labels(name, "none").set(0)

    def sample(self) -> None:
        """Take one sample of everything, and publish it."""
        began = time.perf_counter()
        figures: dict[str, dict[str, float]] = {name: {} for name in GPU_METRICS}
        owned: set[str] = set()
        for source in self._sources:
            if not set(WANTED_OF[source.name]) - owned:
                self._leave(source)
                continue
            self._probe(source)
            mine = self._opened.get(source.name, set()) - owned
            if not mine:
                continue
            try:
                found = _believable(source.sample())
            except Exception as error:
                self._lose(source, _words(error))
                continue
            owned |= mine
            self._gpus |= set(found)
            self._support(source, mine, found)
            for gpu, values in found.items():
                for name in mine & set(values):
                    figures[name][gpu] = values[name]
        told = {gpu for values in figures.values() for gpu in values}
        self._metrics.figures.set(figures, {gpu: gpu in told for gpu in self._gpus})
        self._metrics.sample_seconds.set(time.perf_counter() - began)
        self._metrics.sampled.set_to_current_time()

    def close(self) -> None:
        """Close every source."""
        for source in self._sources:
            if source.name in self._opened:
                _close(source)
        self._opened.clear()

    def _leave(self, source: Source) -> None:
        """Sources before it tell all that it is for: two that count at once may disturb each
        other.
        """
        if self._opened.pop(source.name, None) is not None:
            del self._tried[source.name]
            _close(source)

    def _probe(self, source: Source) -> None:
        now = time.monotonic()
        if source.name in self._opened:
            return
        if now - self._tried.get(source.name, float("-inf")) < self._retry:
            return
        self._tried[source.name] = now
        try:
            supported = source.open()
            identified = source.identify()
        except Exception as error:
            _close(source)
            self._unsupported(source.name, WANTED_OF[source.name], _words(error))
            return
        self._opened[source.name] = {name for name, why in supported.items() if not why}
        for name, why in supported.items():
            self._metrics.supported.labels(name, source.name).set(not why)
            if why:
                self._say(source.name, name, why)
        for gpu, (model, uuid, driver) in identified.items():
            self._metrics.info.labels(gpu, model, uuid, driver).set(1)

    def _support(self, source: Source, names: set[str], found: Mapping[str, Figures]) -> None:
        """Say what of ``names`` a sample tells of every GPU that tells anything."""
        for name in names:
            lacking = [gpu for gpu, values in found.items() if values and name not in values]
            told = any(found.values()) and not lacking
            self._metrics.supported.labels(name, source.name).set(told)
            if not told:
                self._say(source.name, name, f"GPU {', '.join(lacking or found)}: no longer told")

    def _lose(self, source: Source, why: str) -> None:
        self._tried[source.name] = time.monotonic()
        _close(source)
        self._unsupported(source.name, self._opened.pop(source.name), why)

    def _unsupported(self, source: str, names: Collection[str], why: str) -> None:
        """A source that cannot be used at all tells none of what it is for."""
        for name in names:
            self._metrics.supported.labels(name, source).set(0)
        self._say(source, "", why)

    def _say(self, source: str, metric: str, why: str) -> None:
        if (source, f"{metric} {why}") not in self._said:
            self._said.add((source, f"{metric} {why}"))
            logger.warning("%s tells no %s: %s", source, metric or "metric", why)


def _believable(found: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """Without what is no number, and shares that are none; a hair above 1 is 1."""
    return {
        gpu: {
            name: min(value, 1.0) if name.endswith(_SHARE) else value
            for name, value in values.items()
            if math.isfinite(value) and (not name.endswith(_SHARE) or 0 <= value <= _MOST_SHARE)
        }
        for gpu, values in found.items()
    }


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, SourceError) else f"{type(error).__name__}: {error}"


def _close(source: Source) -> None:
    """What a lost GPU's library says to that is of no use."""
    with suppress(Exception):
        source.close()


_COUNTERS = (
    *("tensor_active_ratio", "dram_active_ratio", "sm_active_ratio"),
    *("pcie_receive_bytes_per_second", "pcie_transmit_bytes_per_second"),
)
WANTED_OF = {
    "nvml_gpm": _COUNTERS,
    "dcgm": (*_COUNTERS, "sm_resident_ratio"),
    "cupti_pm": ("tensor_active_ratio", "dram_active_ratio", "sm_active_ratio"),
    "nvml": tuple(name for name in GPU_METRICS if name not in _COUNTERS),
}
"""What each source is for, to be said where it cannot even be opened."""
