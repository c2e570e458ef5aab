"""What the page shows, asked of the gateway's own metrics and of its replicas."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry

from longleaf.metrics import CONTEXT_BUCKETS
from longleaf.ui.samples import (
    Histogram,
    Samples,
    add,
    by_label,
    histogram,
    read_samples,
    registry_samples,
    since,
    value,
)
from longleaf.ui.trees import DraftTree, read_trees

FAMILIES = (
    *("longleaf_commit_len", "longleaf_step_seconds", "longleaf_tree_nodes"),
    "longleaf_kv_pool_tokens",
)
TREES_PATH = "/longleaf/trees"
_FETCH_SECONDS = 2.0
_FRESH_SECONDS = 1.0
_WINDOW_SECONDS = 60.0
_SHOWN_TREES = 6


class Fetches(Protocol):
    """How to ask a replica."""

    async def fetch(self, method: str, path: str, limit: float) -> tuple[int, bytes]:
        """Status and body, in at most ``limit`` seconds."""


class Replica(Protocol):
    """A replica as the gateway knows it."""

    url: str
    in_flight: int

    @property
    def state(self) -> str:
        """In one word."""

    @property
    def client(self) -> Fetches:
        """How to ask it."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One row. ``pool``: KV slots by state, empty where the replica does not tell; ``why``: it."""

    url: str
    state: str
    in_flight: int
    pool: Mapping[str, float]
    reserved: float | None
    external: float | None
    capacity: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class ContextView:
    """Steps at contexts of one bucket, of all replicas together."""

    bucket: str
    commit_len: Histogram
    step_seconds: Histogram
    nodes: Histogram


@dataclass(frozen=True, slots=True)
class View:
    """The page's content. ``window``: seconds that ``contexts`` and ``decisions`` cover; None:
    since each process started.
    """

    at: float
    replicas: Sequence[ReplicaView]
    decisions: Mapping[tuple[str, str], float]
    queue_depth: float
    queue_wait: Histogram
    contexts: Sequence[ContextView]
    trees: Sequence[tuple[str, DraftTree]]
    window: float | None


@dataclass(slots=True)
class _History:
    """Counters of one process as they were lately, to tell what is from what was."""

    taken: deque[tuple[float, Samples]] = field(default_factory=deque)

    def grown(self, now: float, samples: Samples) -> tuple[Samples, float | None]:
        """Growth since the oldest kept sample and its age; all of it where none is kept."""
        while len(self.taken) > 1 and self.taken[1][0] <= now - _WINDOW_SECONDS:
            self.taken.popleft()
        if self.taken and self.taken[0][0] < now - 2 * _WINDOW_SECONDS:
            self.taken.clear()
        oldest = self.taken[0] if self.taken else None
        self.taken.append((now, samples))
        if oldest is None:
            return samples, None
        return since(samples, oldest[1]), now - oldest[0]


@dataclass(frozen=True, slots=True)
class _Told:
    """What one replica answered."""

    samples: Samples
    trees: Sequence[DraftTree]
    why: str = ""


class Watch:
    """Makes views, one a second at most however many look. Replicas are asked when somebody does.

    ``replicas``: those of now. ``registry``: the gateway's metrics.
    """

    def __init__(
        self,
        replicas: Callable[[], Sequence[Replica]],
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._replicas = replicas
        self._registry = registry
        self._clock = clock
        self._lock = asyncio.Lock()
        self._latest: View | None = None
        self._histories: dict[str, _History] = {}

    async def view(self) -> View:
        """The latest view, at most a second old."""
        async with self._lock:
            if self._latest is None or self._clock() - self._latest.at >= _FRESH_SECONDS:
                self._latest = await self._look()
            return self._latest

    async def _look(self) -> View:
        replicas = list(self._replicas())
        told = await asyncio.gather(*(_ask(replica) for replica in replicas))
        now = self._clock()
        own = registry_samples(self._registry)
        urls = {replica.url for replica in replicas}
        self._histories = {url: one for url, one in self._histories.items() if url in {"", *urls}}
        grown, window = self._grown("", now, own)
        parts = []
        for replica, answer in zip(replicas, told, strict=True):
            part, age = self._grown(replica.url, now, answer.samples)
            parts.append(part)
            window = None if age is None or window is None else min(window, age)
        trees = [(r.url, tree) for r, t in zip(replicas, told, strict=True) for tree in t.trees]
        trees.sort(key=lambda one: -one[1].time)
        return View(
            at=now,
            replicas=[_replica_view(r, t, own) for r, t in zip(replicas, told, strict=True)],
            decisions=_decisions(grown),
            queue_depth=value(own, "longleaf_gateway_queue_depth") or 0.0,
            queue_wait=histogram(grown, "longleaf_gateway_queue_wait_seconds"),
            contexts=_contexts(add(parts)),
            trees=trees[:_SHOWN_TREES],
            window=window,
        )

    def _grown(self, process: str, now: float, samples: Samples) -> tuple[Samples, float | None]:
        return self._histories.setdefault(process, _History()).grown(now, samples)


async def _ask(replica: Replica) -> _Told:
    try:
        status, body = await replica.client.fetch("GET", "/metrics", _FETCH_SECONDS)
        if status != 200:
            return _Told({}, (), f"/metrics answers {status}")
        samples = read_samples(body.decode("utf-8", "replace"), FAMILIES)
        status, body = await replica.client.fetch("GET", TREES_PATH, _FETCH_SECONDS)
        return _Told(samples, read_trees(body) if status == 200 else ())
    except Exception as error:  # whatever one replica does, the page must show the others
        return _Told({}, (), str(error) or type(error).__name__)


def _replica_view(replica: Replica, told: _Told, own: Samples) -> ReplicaView:
    url = replica.url
    return ReplicaView(
        url=url,
        state=replica.state,
        in_flight=replica.in_flight,
        pool=by_label(told.samples, "longleaf_kv_pool_tokens", "state"),
        reserved=value(own, "longleaf_gateway_reserved_tokens", replica=url),
        external=value(own, "longleaf_gateway_external_tokens", replica=url),
        capacity=value(own, "longleaf_gateway_kv_capacity_tokens", replica=url),
        why=told.why,
    )


def _decisions(samples: Samples) -> Mapping[tuple[str, str], float]:
    name = "longleaf_gateway_admission_decisions_total"
    found = {
        (dict(labels)["decision"], dict(labels)["reason"]): amount
        for (sample, labels), amount in samples.items()
        if sample == name
    }
    return dict(sorted(found.items()))


def _contexts(samples: Samples) -> list[ContextView]:
    found = []
    for bucket in CONTEXT_BUCKETS:
        view = ContextView(
            bucket,
            histogram(samples, "longleaf_commit_len", context_bucket=bucket),
            histogram(samples, "longleaf_step_seconds", context_bucket=bucket, phase="total"),
            histogram(samples, "longleaf_tree_nodes", context_bucket=bucket),
        )
        if view.commit_len.count:
            found.append(view)
    return found
