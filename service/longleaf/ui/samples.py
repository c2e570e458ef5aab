"""Metric samples, read from an exposition or a registry, and what can be computed from them."""

import math
import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from prometheus_client import CollectorRegistry

Labels = frozenset[tuple[str, str]]
Key = tuple[str, Labels]
Samples = Mapping[Key, float]
"""Values by sample name and labels."""
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)(?: -?\d+)?\s*$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_COUNTERS = ("_total", "_bucket", "_count", "_sum")
_KEPT_KEYS = 16_384
"""Replicas tell the same labels, each time: reading them anew took most of the time."""


def read_samples(text: str, wanted: re.Pattern[str]) -> dict[Key, float]:
    """The samples of an exposition (text format 0.0.4) whose lines begin with ``wanted``;
    ``ValueError`` where one is no sample, or a counter's is no count. prometheus_client's own
    parser takes ten times as long.
    """
    found: dict[Key, float] = {}
    for line in text.split("\n"):
        if wanted.match(line):
            sample = _SAMPLE.match(line)
            if sample is None:
                raise ValueError(f"no sample: {line[:100]!r}")
            name, labels, amount = sample.groups()
            value = float(amount)
            if name.endswith(_COUNTERS) and not 0 <= value < math.inf:
                raise ValueError(f"no count: {line[:100]!r}")
            found[_key(name, labels or "")] = value
    return found


@lru_cache(_KEPT_KEYS)
def _key(name: str, labels: str) -> Key:
    return name, frozenset((key, _plain(of)) for key, of in _LABEL.findall(labels))


def _plain(value: str) -> str:
    return (
        _ESCAPED.sub(lambda one: "\n" if one[1] == "n" else one[1], value)
        if "\\" in value
        else value
    )


def registry_samples(registry: CollectorRegistry, names: Collection[str]) -> dict[Key, float]:
    """The samples of a registry that have one of ``names``, now."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in registry.restricted_registry(names).collect()
        for sample in family.samples
    }


def since(later: Samples, earlier: Samples) -> Samples:
    """What counters grew by; what they are where one fell, for its process restarted. Gauges are
    left out.
    """
    counters = {key: value for key, value in later.items() if key[0].endswith(_COUNTERS)}
    grown = {key: value - earlier.get(key, 0.0) for key, value in counters.items()}
    return counters if any(value < 0 for value in grown.values()) else grown


def value(samples: Samples, name: str, **labels: str) -> float | None:
    """One sample; None where it is absent or not finite."""
    found = samples.get((name, frozenset(labels.items())))
    return None if found is None or not math.isfinite(found) else found


def by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Sums of a family's samples by the values of one label; what is not finite is left out."""
    found: dict[str, float] = {}
    for (sample, labels), amount in samples.items():
        if sample == name and math.isfinite(amount):
            key = dict(labels).get(label)
            if key is not None:
                found[key] = found.get(key, 0.0) + amount
    return found


def ratio(part: float, whole: float) -> float:
    """NaN where ``whole`` is nothing."""
    return part / whole if whole else math.nan


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
        return ratio(self.total, self.count)

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


NOTHING = Histogram((), (), 0.0)


def histograms(samples: Samples) -> dict[Key, Histogram]:
    """Every histogram, by its family's name and labels; ``ValueError`` where one is none."""
    found: dict[Key, dict[float, float]] = {}
    for (name, labels), amount in samples.items():
        if name.endswith("_bucket"):
            series, bound = _bucket(name, labels)
            found.setdefault(series, {})[bound] = amount
    return {
        (name, labels): _histogram(name, buckets, samples.get((f"{name}_sum", labels), 0.0))
        for (name, labels), buckets in found.items()
    }


@lru_cache(_KEPT_KEYS)
def _bucket(name: str, labels: Labels) -> tuple[Key, float]:
    """The series that a bucket is of, and its upper bound."""
    try:
        bound = float(dict(labels)["le"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{name} has a bucket without an upper bound") from error
    return (name.removesuffix("_bucket"), frozenset(x for x in labels if x[0] != "le")), bound


def _histogram(name: str, buckets: Mapping[float, float], total: float) -> Histogram:
    bounds = tuple(sorted(buckets))
    cumulative = [0.0, *(buckets[bound] for bound in bounds)]
    counts = tuple(after - before for before, after in pairwise(cumulative))
    if min(counts) < 0 or not math.isinf(bounds[-1]):
        raise ValueError(f"the buckets of {name} do not add up")
    return Histogram(bounds, counts, total)


def merged(parts: Sequence[Histogram]) -> Histogram:
    """The observations of several processes, in the buckets that all of them have."""
    if not parts:
        return NOTHING
    common = set(parts[0].bounds).intersection(*(part.bounds for part in parts[1:]))
    bounds = tuple(sorted(common))
    counts = [0.0] * len(bounds)
    for part in parts:
        place: Sequence[int] = range(len(bounds))
        if part.bounds != bounds:
            place = [bisect_left(bounds, bound) for bound in part.bounds]
        for index, count in zip(place, part.counts, strict=True):
            counts[index] += count
    return Histogram(bounds, tuple(counts), sum(part.total for part in parts))
