"""Samples: counters between two scrapes, histograms, and what is computed from them."""

import math
import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from longleaf.ui import samples


class Process:
    """A process with metrics, scraped as text."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.asked = Counter("longleaf_asked", "x", ("kind",), registry=self.registry)
        self.pool = Gauge("longleaf_pool", "x", ("state",), registry=self.registry)
        self.sizes = Histogram(
            "longleaf_sizes", "x", ("at",), buckets=(1, 2, 4), registry=self.registry
        )

    def scrape(self, wanted: str) -> samples.Samples:
        return samples.read_samples(generate_latest(self.registry).decode(), re.compile(wanted))


def test_only_the_wanted_families_are_read() -> None:
    process = Process()
    process.asked.labels('a "b"\\').inc(3)
    process.pool.labels("used").set(7)
    found = process.scrape("longleaf_asked")
    assert samples.value(found, "longleaf_asked_total", kind='a "b"\\') == 3
    assert samples.by_label(found, "longleaf_pool", "state") == {}
    assert samples.by_label(process.scrape("longleaf_"), "longleaf_pool", "state") == {"used": 7}
    with pytest.raises(ValueError, match=r"no sample: 'longleaf_asked\{oops'"):
        samples.read_samples("longleaf_asked{oops\n", re.compile("longleaf_asked"))
    same = samples.registry_samples(process.registry, ["longleaf_asked_total"])
    assert samples.value(same, "longleaf_asked_total", kind='a "b"\\') == 3
    assert samples.value(same, "longleaf_asked_total", kind="other") is None
    assert samples.by_label(same, "longleaf_pool", "state") == {}
    process.pool.labels("free").set(math.inf)
    assert samples.by_label(process.scrape("longleaf_"), "longleaf_pool", "state") == {"used": 7}


def test_an_exposition_is_read_as_its_library_reads_it() -> None:
    process = Process()
    for kind in ("a", "", 'x="1",y', "back\\slash", "two\nlines", "\u2028", "{}", " space "):
        process.asked.labels(kind).inc(1.5e-7)
    process.sizes.labels("é").observe(3)
    process.pool.labels("nan").set(math.inf)
    text = generate_latest(process.registry).decode()
    parsed = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples.read_samples(text, re.compile("longleaf_")) == parsed
    assert len(parsed) > 15


def test_growth_of_counters_and_a_restart() -> None:
    process = Process()
    process.asked.labels("a").inc(3)
    process.pool.labels("used").set(7)
    earlier = process.scrape("longleaf_")
    process.asked.labels("a").inc(2)
    process.asked.labels("b").inc(1)
    process.pool.labels("used").set(1)
    grown = samples.since(process.scrape("longleaf_"), earlier)
    assert samples.by_label(grown, "longleaf_asked_total", "kind") == {"a": 2, "b": 1}
    assert samples.by_label(grown, "longleaf_pool", "state") == {}

    restarted = Process()
    restarted.asked.labels("a").inc(1)
    grown = samples.since(restarted.scrape("longleaf_"), earlier)
    assert samples.by_label(grown, "longleaf_asked_total", "kind") == {"a": 1}


X = frozenset({("at", "x")})


def test_a_histogram_over_two_processes() -> None:
    first, second = Process(), Process()
    for amount in (0.5, 1.5, 1.5, 3.0):
        first.sizes.labels("x").observe(amount)
    second.sizes.labels("x").observe(9.0)
    second.sizes.labels("y").observe(1.0)
    both = [samples.histograms(process.scrape("longleaf_")) for process in (first, second)]
    found = samples.merged([one["longleaf_sizes", X] for one in both])
    assert list(found.bounds) == [1, 2, 4, math.inf]
    assert list(found.counts) == [1, 2, 1, 1]
    assert found.mean == pytest.approx(15.5 / 5)
    # rank 2.5 of 5 is 1.5 of 2 into the bucket from 1 to 2
    assert found.quantile(0.5) == pytest.approx(1.75)
    assert found.quantile(1.0) == 4, "what lies beyond the last bound is not guessed"
    assert math.isnan(samples.merged([]).mean)
    assert math.isnan(samples.NOTHING.quantile(0.5))


def test_processes_of_other_buckets_meet_in_those_that_both_have() -> None:
    first = samples.Histogram((1.0, 2.0, 4.0, math.inf), (1.0, 2.0, 3.0, 4.0), 30.0)
    second = samples.Histogram((2.0, 3.0, 4.0, math.inf), (10.0, 20.0, 30.0, 40.0), 300.0)
    both = samples.merged([first, second])
    assert both == samples.Histogram((2.0, 4.0, math.inf), (13.0, 53.0, 44.0), 330.0)
    assert samples.merged([second, first]) == both


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a_bucket 3", "a_bucket has a bucket without an upper bound"),
        ('a_bucket{le="abc"} 3', "a_bucket has a bucket without an upper bound"),
        ('a_bucket{le="1.0"} 3', "the buckets of a do not add up"),
        ('a_bucket{le="1.0"} 3\na_bucket{le="+Inf"} 2', "the buckets of a do not add up"),
        ('a_bucket{le="+Inf"} NaN', "no count"),
        ("a_sum +Inf", "no count"),
        ("a_total -1", "no count"),
        ("a_total abc", "could not convert"),
    ],
)
def test_what_counts_nothing_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        samples.histograms(samples.read_samples(text, re.compile("a_")))
