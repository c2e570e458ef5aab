"""Read our families from a server's /metrics."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from longleaf.metrics import CONTEXT_BUCKETS, STEP_PHASES
from ops.gpu.client import Client


@dataclass(frozen=True, slots=True)
class Counters:
    """Samples of the families with a context bucket, by name, bucket and, for times, phase."""

    values: Mapping[tuple[str, str, str], float]

    def get(self, name: str, bucket: str, phase: str = "") -> float:
        """The sample's value; 0 where it has not been observed."""
        return self.values.get((name, bucket, phase), 0.0)


def counters(client: Client) -> Counters:
    """Read every sample of our families that has a context bucket."""
    return Counters(dict(_samples(client.get("/metrics").decode())))


def _samples(text: str) -> Iterator[tuple[tuple[str, str, str], float]]:
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("longleaf_"):
            continue
        for sample in family.samples:
            labels = sample.labels
            if "context_bucket" in labels and "le" not in labels:
                key = (sample.name, labels["context_bucket"], labels.get("phase", ""))
                yield key, sample.value


def steps_by_nodes(client: Client) -> Counter[int]:
    """Steps that each node count has had; counts that no bucket ends at are told by the next."""
    cumulative: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").decode()):
        for sample in family.samples:
            if sample.name == "longleaf_tree_nodes_bucket" and sample.labels["le"] != "+Inf":
                bucket = cumulative.setdefault(sample.labels["context_bucket"], {})
                bucket[float(sample.labels["le"])] = sample.value
    found: Counter[int] = Counter()
    for counts in cumulative.values():
        below = 0.0
        for nodes, steps in sorted(counts.items()):
            found[int(nodes)] += int(steps - below)
            below = steps
    return found


def phase_means(before: Counters, after: Counters) -> dict[str, float]:
    """Mean milliseconds of each phase of the steps that were timed in between."""
    means = {}
    for phase in STEP_PHASES:
        seconds, steps = (
            sum(
                after.get(f"longleaf_step_seconds_{part}", bucket, phase)
                - before.get(f"longleaf_step_seconds_{part}", bucket, phase)
                for bucket in CONTEXT_BUCKETS
            )
            for part in ("sum", "count")
        )
        if steps:
            means[phase] = 1e3 * seconds / steps
    return means
