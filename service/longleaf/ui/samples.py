"""Metric samples, read from an exposition or a registry, and what can be computed from them."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client import CollectorRegistry

Labels = frozenset[tuple[str, str]]
Samples = Mapping[tuple[str, Labels], float]
"""Values by sample name and labels."""
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)(?: -?\d+)?\s*$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_COUNTERS = ("_total", "_bucket", "_count", "_sum")


def read_samples(text: str, families: tuple[str, ...]) -> dict[tuple[str, Labels], float]:
    """The samples of an exposition (text format 0.0.4) whose names begin with one of ``families``;
    ``ValueError`` where one is no sample. The gateway's streams wait meanwhile: prometheus_client's
    own parser takes ten times as long.
    """
    found: dict[tuple[str, Labels], float] = {}
    for line in text.split("\n"):
        if line.startswith(families):
            sample = _SAMPLE.match(line)
            if sample is None:
                raise ValueError(f"no sample: {line[:100]!r}")
            name, labels, amount = sample.groups()
            pairs = _LABEL.findall(labels) if labels else ()
            found[name, frozenset((key, _plain(of)) for key, of in pairs)] = float(amount)
    return found


def _plain(value: str) -> str:
    return (
        _ESCAPED.sub(lambda one: "\n" if one[1] == "n" else one[1], value)
        if "\\" in value
        else value
    )


def registry_samples(registry: CollectorRegistry) -> dict[tuple[str, Labels], float]:
    """The samples of a registry, now."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def since(later: Samples, earlier: Samples) -> Samples:
    """What counters grew by; what they are where one fell, for its process restarted. Gauges are
    left out.
    """
    counters = {key: value for key, value in later.items() if key[0].endswith(_COUNTERS)}
    grown = {key: value - earlier.get(key, 0.0) for key, value in counters.items()}
    return counters if any(value < 0 for value in grown.values()) else grown


def add(parts: Iterable[Samples]) -> Samples:
    """Sums over processes."""
    found: dict[tuple[str, Labels], float] = {}
    for part in parts:
        for key, value in part.items():
            found[key] = found.get(key, 0.0) + value
    return found


def value(samples: Samples, name: str, **labels: str) -> float | None:
    """One sample; None where it is absent or NaN."""
    found = samples.get((name, frozenset(labels.items())))
    return None if found is None or math.isnan(found) else found


def by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Sums of a family's samples by the values of one label."""
    found: dict[str, float] = {}
    for (sample, labels), amount in samples.items():
        if sample == name and (key := dict(labels).get(label)) is not None:
            found[key] = found.get(key, 0.0) + amount
    return found


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations in buckets: ``bounds`` are upper, the last one infinite; ``counts`` of each."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def count(self) -> float:
        """Number of observations."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """NaN where nothing was observed."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """Estimated as Prometheus does: linear within a bucket, the last finite bound at most."""
        if not self.count:
            return math.nan
        rank, lower, before = share * self.count, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if before + count >= rank and count:
                if math.isinf(bound):
                    return lower
                return lower + (bound - lower) * (rank - before) / count
            before += count
            lower = bound if math.isfinite(bound) else lower
        return lower


def histogram(samples: Samples, name: str, **labels: str) -> Histogram:
    """A histogram family's series with exactly these labels; empty where there is none."""
    wanted = set(labels.items())
    found: dict[float, float] = {}
    for (sample, have), amount in samples.items():
        if sample == f"{name}_bucket" and wanted <= have and len(have) == len(wanted) + 1:
            found[float(dict(have)["le"])] = amount
    bounds = tuple(sorted(found))
    cumulative = [0.0, *(found[bound] for bound in bounds)]
    counts = tuple(after - before for before, after in pairwise(cumulative))
    return Histogram(bounds, counts, value(samples, f"{name}_sum", **labels) or 0.0)
