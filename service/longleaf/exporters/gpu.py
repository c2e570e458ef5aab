"""The GPU exporter: of each metric the first source that has it, and nothing where none has."""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from longleaf.exporters.source import Source, SourceError
from longleaf.metrics import GPU_METRICS, GpuMetrics

logger = logging.getLogger(__name__)


class GpuExporter:
    """Probes ``sources`` in order, then samples those that are of use.

    A figure that a sample lacks ends its series: what is unknown is absent, never 0 and never the
    value of some time ago. A source that fails is closed, and tried again after ``retry`` seconds;
    one that the sources before it make needless is not opened.
    """

    def __init__(self, sources: Sequence[Source], metrics: GpuMetrics, retry: float = 60.0) -> None:
        self._sources = sources
        self._metrics = metrics
        self._retry = retry
        self._opened: dict[str, set[str]] = {}
        self._tried: dict[str, float] = {}
        self._said: set[tuple[str, str]] = set()
        self._shown: dict[str, set[str]] = {name: set() for name in GPU_METRICS}

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
                found = source.sample()
            except SourceError as error:
                self._lose(source, str(error))
                continue
            owned |= mine
            for gpu, values in found.items():
                for name in mine & set(values):
                    figures[name][gpu] = values[name]
        self._publish(figures)
        self._metrics.sample_seconds.set(time.perf_counter() - began)

    def close(self) -> None:
        """Close every source."""
        for source in self._sources:
            if source.name in self._opened:
                source.close()
        self._opened.clear()

    def _leave(self, source: Source) -> None:
        """Sources before it tell all that it is for: two that count at once may disturb each
        other.
        """
        if self._opened.pop(source.name, None) is not None:
            del self._tried[source.name]
            with suppress(SourceError):
                source.close()

    def _probe(self, source: Source) -> None:
        now = time.monotonic()
        if source.name in self._opened:
            return
        if now - self._tried.get(source.name, float("-inf")) < self._retry:
            return
        self._tried[source.name] = now
        try:
            supported = source.open()
        except SourceError as error:
            with suppress(SourceError):
                source.close()
            self._unsupported(source.name, "", str(error))
            return
        self._opened[source.name] = {name for name, why in supported.items() if not why}
        for name, why in supported.items():
            self._metrics.supported.labels(name, source.name).set(not why)
            if why:
                self._say(source.name, name, why)
        for gpu, (model, uuid, driver) in source.identify().items():
            self._metrics.info.labels(gpu, model, uuid, driver).set(1)

    def _lose(self, source: Source, why: str) -> None:
        lost = self._opened.pop(source.name)
        self._tried[source.name] = time.monotonic()
        with suppress(SourceError):
            source.close()
        for name in lost:
            self._metrics.supported.labels(name, source.name).set(0)
        self._say(source.name, "", why)

    def _unsupported(self, source: str, metric: str, why: str) -> None:
        """A source that cannot be used at all tells none of what it is for."""
        for name in WANTED_OF[source]:
            self._metrics.supported.labels(name, source).set(0)
        self._say(source, metric, why)

    def _say(self, source: str, metric: str, why: str) -> None:
        if (source, f"{metric} {why}") not in self._said:
            self._said.add((source, f"{metric} {why}"))
            logger.warning("%s tells no %s: %s", source, metric or "metric", why)

    def _publish(self, figures: dict[str, dict[str, float]]) -> None:
        for name, values in figures.items():
            gauge = self._metrics.values[name]
            for gpu, value in values.items():
                gauge.labels(gpu).set(value)
            for gpu in self._shown[name] - set(values):
                gauge.remove(gpu)
            self._shown[name] = set(values)


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
