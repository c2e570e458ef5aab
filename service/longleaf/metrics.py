"""Every metric that Longleaf publishes: name, help text, labels and buckets, in one place.

The embedded engine and the SGLang plugin publish the engine families, the gateway publishes its
own. A family object belongs to the registry that is passed in: nothing here is process-wide.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

_CONTEXT_BOUNDS: tuple[tuple[int, str], ...] = (
    (1 << 10, "1k"),
    (4 << 10, "4k"),
    (16 << 10, "16k"),
    (32 << 10, "32k"),
    (64 << 10, "64k"),
    (128 << 10, "128k"),
    (200_000, "200k"),
)
CONTEXT_BUCKETS: tuple[str, ...] = (*(name for _, name in _CONTEXT_BOUNDS), "inf")
"""Values of the label ``context_bucket``, by upper bound (1k is 1,024 tokens; 200k is 200,000)."""

STEP_PHASES: tuple[str, ...] = ("draft", "build", "verify", "accept", "compact", "total")
"""Values of the label ``phase``: the phases of one draft-to-compact step, and their sum."""

_COUNT_BUCKETS = tuple(float(n) for n in range(1, 17))
_DEPTH_BUCKETS = tuple(float(n) for n in range(16))
_NODE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 9.0, 16.0, 17.0, 24.0, 32.0, 33.0, 48.0, 64.0, 65.0, 128.0)
_STEP_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5),
)
_REQUEST_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
    *(300.0, 600.0, 1800.0),
)


def context_bucket(tokens: int) -> str:
    """Name the bucket that a context of ``tokens`` tokens falls into (upper bounds inclusive)."""
    return CONTEXT_BUCKETS[bisect_left(_CONTEXT_BOUNDS, (tokens, ""))]


class EngineMetrics:
    """The engine families: acceptance, step time and KV traffic, by context."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_context = ("context_bucket",)
        self.commit_len = Histogram(
            "longleaf_commit_len",
            "Tokens that one step of one request commits: accepted drafts plus the bonus token.",
            by_context,
            buckets=_COUNT_BUCKETS,
            registry=registry,
        )
        self.accepted_depth = Histogram(
            "longleaf_accepted_depth",
            "Depth of a step's last accepted tree node (root = 0); equals accepted drafts.",
            by_context,
            buckets=_DEPTH_BUCKETS,
            registry=registry,
        )
        self.tree_nodes = Histogram(
            "longleaf_tree_nodes",
            "Rows that a step verifies for one request: the root and the drafted nodes.",
            by_context,
            buckets=_NODE_BUCKETS,
            registry=registry,
        )
        self.step_seconds = Histogram(
            "longleaf_step_seconds",
            "Wall time of a step's phases, and of the whole step (phase total).",
            ("phase", "context_bucket"),
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self.kv_read_bytes = Counter(
            "longleaf_kv_read_bytes_total",
            "Bytes of latent KV rows that target attention read, in steps and prefill.",
            registry=registry,
        )
        self.drafter_span_tokens = Histogram(
            "longleaf_drafter_span_tokens",
            "Context rows that the drafter's windowed layers read for one draft.",
            by_context,
            buckets=(16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 16384.0, 65536.0),
            registry=registry,
        )
        self.kv_pool_tokens = Gauge(
            "longleaf_kv_pool_tokens",
            "Slots of the KV pool by state: used by running requests, cached for reuse, or free.",
            ("state",),
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self._add_derived(registry, by_context)

    def _add_derived(self, registry: CollectorRegistry, by_context: tuple[str, ...]) -> None:
        """Families that rules divide by one another: both sides count the same steps."""
        self.timed_context_tokens = Counter(
            "longleaf_timed_context_tokens_total",
            "Context tokens, summed over the observations of longleaf_step_seconds (phase total).",
            by_context,
            registry=registry,
        )
        self.timed_verify_bytes = Counter(
            "longleaf_timed_verify_kv_bytes_total",
            "Bytes of latent KV rows read by the verify forwards whose time was taken.",
            registry=registry,
        )
        self.timed_verify_seconds = Counter(
            "longleaf_timed_verify_seconds_total",
            "Time of those verify forwards, each counted once however many requests it serves.",
            registry=registry,
        )
        self.plain_step_seconds = Histogram(
            "longleaf_plain_step_seconds",
            "Wall time of steps in which nothing was drafted: plain decoding.",
            by_context,
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self.drafter_window_tokens = Gauge(
            "longleaf_drafter_window_tokens",
            "Context rows that the drafter's windowed layers may read for one draft.",
            multiprocess_mode="mostrecent",
            registry=registry,
        )


class SimulationMetrics:
    """What a simulated engine publishes about the simulation itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lost_seconds = Gauge(
            "longleaf_simulation_lost_seconds",
            "Time by which the simulation fell behind its curve because this machine was too slow; "
            "while it grows, times are not the curve's.",
            registry=registry,
        )


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine reports of its load: requests, tokens, tokens a second, shares from 0 to 1."""

    num_running_reqs: int
    num_queue_reqs: int
    token_usage: float
    kv_used_tokens: int
    max_total_num_tokens: int
    gen_throughput: float
    cache_hit_rate: float
    spec_accept_length: float
    spec_accept_rate: float
    spec_verify_calls_total: int


_LOAD_HELP: Mapping[str, str] = {
    "num_running_reqs": "The number of running requests.",
    "num_queue_reqs": "The number of requests in the waiting queue.",
    "token_usage": "Used share of the KV pool, 0 to 1.",
    "kv_used_tokens": "Slots of the KV pool that running requests use.",
    "max_total_num_tokens": "Slots of the KV pool.",
    "gen_throughput": "Generated tokens a second.",
    "cache_hit_rate": "Share of prompt tokens that the prefix cache had.",
    "spec_accept_length": "Mean tokens that a verify step commits, the bonus token included.",
    "spec_accept_rate": "Accepted share of the drafted nodes.",
    "spec_verify_calls_total": "Verify steps of speculating requests.",
}


class SglangMetrics(Collector):
    """The ``sglang:`` families that gateways read; ``load`` is asked at every scrape."""

    def __init__(
        self, registry: CollectorRegistry, model_name: str, load: Callable[[], EngineLoad]
    ) -> None:
        self._labels = {"model_name": model_name}
        self._load = load
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        load = self._load()
        for field, text in _LOAD_HELP.items():
            name = f"sglang:{field}"
            kind = "counter" if field.endswith("_total") else "gauge"
            metric = Metric(name.removesuffix("_total"), text, kind)
            metric.add_sample(name, self._labels, getattr(load, field))
            yield metric


class GatewayMetrics:
    """The gateway families: what clients got, how fast, and what the replicas did."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_route = ("route",)
        self.requests = Counter(
            "longleaf_gateway_requests_total",
            "Requests answered, by route, HTTP status (499: the client left) and reason "
            "(ok, or the error code of the answer).",
            ("route", "code", "reason"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "longleaf_gateway_in_flight_requests",
            "Requests that have arrived and are not yet answered in full.",
            by_route,
            registry=registry,
        )
        self.first_byte_seconds = Histogram(
            "longleaf_gateway_first_byte_seconds",
            "Time from a request's arrival to the first byte of its answer's body.",
            by_route,
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "longleaf_gateway_request_seconds",
            "Time from a request's arrival to the end of its answer.",
            by_route,
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        by_context = ("context_bucket",)
        self.ttft_seconds = Histogram(
            "longleaf_gateway_ttft_seconds",
            "Time from a streamed request's arrival to its first event, by prompt length.",
            by_context,
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self.token_seconds = Histogram(
            "longleaf_gateway_time_per_token_seconds",
            "Time per token after the first event of a stream, where its usage was told.",
            by_context,
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self.e2e_seconds = Histogram(
            "longleaf_gateway_e2e_seconds",
            "Time from a request's arrival to the end of its answer, by prompt length.",
            by_context,
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self.upstream_errors = Counter(
            "longleaf_gateway_upstream_errors_total",
            "Failed exchanges with a replica, by kind of failure.",
            ("replica", "kind"),
            registry=registry,
        )
        self.retries = Counter(
            "longleaf_gateway_retries_total",
            "Requests sent to another replica because the one before failed without an answer.",
            registry=registry,
        )
        self.aborts = Counter(
            "longleaf_gateway_aborts_total",
            "Generations that a replica was told to stop, by how far the answer had come "
            "(before_first_event, after_first_event).",
            ("when",),
            registry=registry,
        )
        self.replica_ready = Gauge(
            "longleaf_gateway_replica_ready",
            "1 while the replica passes its health checks and its limits are known, else 0.",
            ("replica",),
            registry=registry,
        )
        self.replica_state = Gauge(
            "longleaf_gateway_replica_state",
            "1 for the state that a replica is in: starting, ready, unhealthy (by its checks), "
            "circuit_open (its requests fail) or draining.",
            ("replica", "state"),
            registry=registry,
        )
        self.discovery_up = Gauge(
            "longleaf_gateway_discovery_up",
            "1 while the cluster's API tells the replicas, 0 while an older list is in use.",
            registry=registry,
        )
        self.token_counts = Counter(
            "longleaf_gateway_token_counts_total",
            "Prompts by how their length was established: bounded (by bytes, no count needed), "
            "given (as token ids), local (the gateway's own tokenizer), counted (by a replica's) "
            "or failed.",
            ("outcome",),
            registry=registry,
        )
        self._add_admission(registry)

    def _add_admission(self, registry: CollectorRegistry) -> None:
        by_replica = ("replica",)
        self.admission = Counter(
            "longleaf_gateway_admission_decisions_total",
            "Requests admitted (at_once or waited) or refused, by reason.",
            ("decision", "reason"),
            registry=registry,
        )
        self.queue_depth = Gauge(
            "longleaf_gateway_queue_depth",
            "Requests that wait for room on a replica.",
            registry=registry,
        )
        self.queue_wait_seconds = Histogram(
            "longleaf_gateway_queue_wait_seconds",
            "Time that requests waited for room, however the wait ended.",
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self.reservations = Gauge(
            "longleaf_gateway_reservations",
            "Requests that hold a reservation.",
            by_replica,
            registry=registry,
        )
        self.reserved_tokens = Gauge(
            "longleaf_gateway_reserved_tokens",
            "KV pool tokens reserved: uncached prompts, completions and tree nodes.",
            by_replica,
            registry=registry,
        )
        self.reserved_bytes = Gauge(
            "longleaf_gateway_reserved_kv_bytes",
            "The same in bytes, where the replica reports its cache's size.",
            by_replica,
            registry=registry,
        )
        self.external_tokens = Gauge(
            "longleaf_gateway_external_tokens",
            "KV pool tokens in use by the replica's own report beyond what is reserved here.",
            by_replica,
            registry=registry,
        )
        self.prefill_tokens = Gauge(
            "longleaf_gateway_prefill_tokens_in_flight",
            "Prompt tokens sent to a replica whose first token has not come.",
            by_replica,
            registry=registry,
        )
        self.kv_capacity = Gauge(
            "longleaf_gateway_kv_capacity_tokens",
            "Slots of the KV pool, as the replica reports.",
            by_replica,
            registry=registry,
        )
        self.step_residual = Gauge(
            "longleaf_gateway_step_model_residual",
            "Mean relative error of the step model's latest predictions.",
            by_replica,
            registry=registry,
        )
        self.step_coefficient = Gauge(
            "longleaf_gateway_step_model_coefficient",
            "Fitted step time: a (seconds) + b (a token of context) + c (a sequence).",
            ("replica", "term"),
            registry=registry,
        )
        self.prefill_rate = Gauge(
            "longleaf_gateway_prefill_tokens_per_second",
            "Prompt tokens a second while a replica prefills, lately.",
            by_replica,
            registry=registry,
        )
        self.tokenizer_seconds = Histogram(
            "longleaf_gateway_tokenizer_seconds",
            "Time to count one prompt's tokens, by who did it (local, replica).",
            ("where",),
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self.tokenizer_up = Gauge(
            "longleaf_gateway_tokenizer_up",
            "1 if the configured tokenizer loads, 0 if not: its model's prompts are then counted "
            "by replicas.",
            ("tokenizer",),
            registry=registry,
        )
        self.key_file_up = Gauge(
            "longleaf_gateway_key_file_up",
            "1 while the key file is read without error, 0 while an older state is in use.",
            registry=registry,
        )

    def forget_replica(self, url: str) -> None:
        """A replica is gone for good: its series end."""
        for family in vars(self).values():
            if isinstance(family, Counter | Gauge | Histogram):
                with suppress(ValueError):  # families without that label
                    family.remove_by_labels({"replica": url})


GPU_METRICS: Mapping[str, str] = {
    "tensor_active_ratio": "Share of cycles in which the tensor pipes work, 0 to 1.",
    "dram_active_ratio": "Share of device memory's peak bandwidth in use (of cycles, where "
    "DCGM tells it), 0 to 1.",
    "sm_active_ratio": "Share of the SMs that have work, averaged over time, 0 to 1.",
    "sm_resident_ratio": "Share of time in which a kernel is resident, 0 to 1. This is what "
    "nvidia-smi calls utilization; it says nothing about work.",
    "power_watts": "Power draw of the board, in watts.",
    "power_limit_watts": "Enforced power limit of the board, in watts.",
    "sm_clock_hertz": "Clock of the SMs.",
    "memory_clock_hertz": "Clock of the device memory.",
    "memory_used_bytes": "Device memory in use.",
    "memory_total_bytes": "Device memory.",
    "memory_peak_bytes_per_second": "Peak of device memory: its highest clock times its width.",
    "pcie_receive_bytes_per_second": "Bytes a second that the GPU receives over PCIe.",
    "pcie_transmit_bytes_per_second": "Bytes a second that the GPU sends over PCIe.",
}
"""What the GPU exporter publishes as ``longleaf_gpu_<name>``, with help texts."""


class GpuFigures(Collector):
    """Figures by metric and GPU, until ``expiry`` seconds after they were set: what a source that
    hangs said last is no figure of now. ``clock`` gives seconds.
    """

    def __init__(self, expiry: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._expiry = expiry
        self._clock = clock
        self._now: tuple[float, Mapping[str, Mapping[str, float]], Mapping[str, bool]]
        self._now = -math.inf, {}, {}

    def set(self, figures: Mapping[str, Mapping[str, float]], up: Mapping[str, bool]) -> None:
        """``figures``: values by metric (``GPU_METRICS``) and GPU; ``up``: whether it has any."""
        self._now = self._clock(), figures, up

    def collect(self) -> Iterable[Metric]:
        """See ``Collector``."""
        at, figures, up = self._now
        if self._clock() - at > self._expiry:
            figures, up = {}, {}
        for name, text in GPU_METRICS.items():
            yield _by_gpu(f"longleaf_gpu_{name}", text, figures.get(name, {}))
        yield _by_gpu("longleaf_gpu_up", "1 if the GPU told any figure in the last sample.", up)

    def describe(self) -> Iterable[Metric]:
        """See ``Collector``."""
        return self.collect()


def _by_gpu(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("gpu",))
    for gpu, value in values.items():
        family.add_metric((gpu,), value)
    return family


class GpuMetrics:
    """The GPU families. What no source can tell is absent, and ``supported`` says so.

    ``expiry``: seconds for which a sample's figures are published.
    """

    def __init__(self, registry: CollectorRegistry, expiry: float = 15.0) -> None:
        self.figures = GpuFigures(expiry)
        registry.register(self.figures)
        self.info = Gauge(
            "longleaf_gpu_info",
            "1, with the GPU's name, its UUID and the driver's version.",
            ("gpu", "name", "uuid", "driver"),
            registry=registry,
        )
        self.supported = Gauge(
            "longleaf_gpu_metric_supported",
            "1 if the source tells the metric of every GPU here that tells anything, else 0: where "
            "no other source has it, it is absent. Source none: none that is asked is for it.",
            ("metric", "source"),
            registry=registry,
        )
        self.sample_seconds = Gauge(
            "longleaf_gpu_sample_seconds",
            "Time that the exporter's last sample of all GPUs took.",
            registry=registry,
        )
        self.sampled = Gauge(
            "longleaf_gpu_sample_timestamp_seconds",
            "When the exporter's last sample ended, in Unix seconds; before the first, when it "
            "began.",
            registry=registry,
        )
        self.sampled.set_to_current_time()


class ProbeMetrics:
    """What probes publish of their last run."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_text = ("text", "context_bucket")
        self.commit_len = Gauge(
            "longleaf_probe_commit_len",
            "Mean commit_len of the commit probe's text at a context, in its last run.",
            by_text,
            registry=registry,
        )
        self.commit_len_expected = Gauge(
            "longleaf_probe_commit_len_expected",
            "The commit_len that this text should reach there: what it reached at the shortest "
            "context, or in the run given as baseline.",
            by_text,
            registry=registry,
        )
        self.passed = Gauge(
            "longleaf_probe_passed",
            "1 if the probe's last run passed, else 0; verdict is its answer in a word.",
            ("probe", "verdict"),
            registry=registry,
        )
        self.timestamp = Gauge(
            "longleaf_probe_timestamp_seconds",
            "When the probe last ended, or its watch began, in Unix seconds.",
            ("probe",),
            registry=registry,
        )
        self.max_age = Gauge(
            "longleaf_probe_max_age_seconds",
            "Seconds after which the probe should have ended again.",
            ("probe",),
            registry=registry,
        )
