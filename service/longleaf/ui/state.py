"""What the page shows, asked of the gateway's own metrics and of its replicas."""

import asyncio
import dataclasses
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from longleaf.metrics import CONTEXT_BUCKETS
from longleaf.ui.samples import (
    NOTHING,
    Histogram,
    Key,
    Samples,
    by_label,
    histograms,
    merged,
    read_samples,
    registry_samples,
    since,
    value,
)
from longleaf.ui.trees import DraftTree, read_trees

WANTED = re.compile(
    r'longleaf_(?:commit_len|tree_nodes|kv_pool_tokens|step_seconds.*phase="total")'
)
"""Lines of a replica's metrics; of the phases of a step only their sum is shown."""
P = ParamSpec("P")
T = TypeVar("T")
_POOL, _DECISIONS = "longleaf_kv_pool_tokens", "longleaf_gateway_admission_decisions_total"
_DEPTH, _WAIT = "longleaf_gateway_queue_depth", "longleaf_gateway_queue_wait_seconds"
_RESERVED = "longleaf_gateway_reserved_tokens"
_EXTERNAL = "longleaf_gateway_external_tokens"
_CAPACITY = "longleaf_gateway_kv_capacity_tokens"
_OWN = (
    *(_DECISIONS, _DEPTH, f"{_WAIT}_bucket", f"{_WAIT}_sum", f"{_WAIT}_count"),
    *(_RESERVED, _EXTERNAL, _CAPACITY),
)
TREES_PATH = "/longleaf/trees"
_FETCH_SECONDS = 2.0
_LOOK_SECONDS = 10.0
_FETCHES = 32
"""Replicas that are asked at once."""
_FRESH_SECONDS = 1.0
_REST = 4.0
"""A view is not renewed before that many times what it cost: of a large fleet less often."""
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
    """What one replica answered. ``steps``: its histograms' growth, over ``window`` seconds."""

    pool: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[Key, Histogram] = field(default_factory=dict)
    window: float | None = None
    trees: Sequence[DraftTree] = ()
    why: str = ""


class Watch:
    """Makes views, one a second at most however many look. Replicas are asked when somebody does,
    and what they say is read in a thread, so that the gateway's streams go on.

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
        self._fetching = asyncio.Semaphore(_FETCHES)
        self._working = asyncio.Lock()
        self._busy = 0.0
        self._latest: View | None = None
        self._histories: dict[str, _History] = {}

    async def view(self) -> View:
        """The latest view, a second old at most if it costs little."""
        async with self._lock:
            rest = max(_FRESH_SECONDS, _REST * self._busy)
            if self._latest is None or self._clock() - self._latest.at >= rest:
                self._busy = 0.0
                self._latest = await self._look()
            return self._latest

    async def _look(self) -> View:
        replicas = list(self._replicas())
        urls = {replica.url for replica in replicas}
        self._histories = {url: one for url, one in self._histories.items() if url in {"", *urls}}
        deadline = time.monotonic() + _LOOK_SECONDS
        told = await asyncio.gather(*(self._ask(replica, deadline) for replica in replicas))
        own = registry_samples(self._registry, _OWN)
        return await self._work(self._view, replicas, told, own)

    async def _ask(self, replica: Replica, deadline: float) -> _Told:
        """Whatever one replica does, the page must show the others."""
        told = _Told()
        async with self._fetching:
            limit = min(_FETCH_SECONDS, deadline - time.monotonic())
            if limit <= 0:
                return _Told(why=f"not asked: the others took {_LOOK_SECONDS:g} s")
            try:
                status, body = await replica.client.fetch("GET", "/metrics", limit)
                if status != 200:
                    return _Told(why=f"/metrics answers {status}")
                told = await self._work(self._read, replica.url, body)
                status, body = await replica.client.fetch("GET", TREES_PATH, limit)
                if status != 200:
                    return told
                trees = await self._work(read_trees, body, _SHOWN_TREES)
                return dataclasses.replace(told, trees=trees)
            except Exception as error:
                return dataclasses.replace(told, why=str(error) or type(error).__name__)

    async def _work(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In a thread, one at a time: several would keep the event loop from its turn."""

        def timed() -> T:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._busy += time.thread_time() - began

        async with self._working:
            return await asyncio.to_thread(timed)

    def _read(self, url: str, body: bytes) -> _Told:
        samples = read_samples(body.decode("utf-8", "replace"), WANTED)
        histograms(samples)
        grown, window = self._grown(url, self._clock(), samples)
        return _Told(by_label(samples, _POOL, "state"), histograms(grown), window)

    def _grown(self, process: str, now: float, samples: Samples) -> tuple[Samples, float | None]:
        return self._histories.setdefault(process, _History()).grown(now, samples)

    def _view(self, replicas: Sequence[Replica], told: Sequence[_Told], own: Samples) -> View:
        now = self._clock()
        grown, window = self._grown("", now, own)
        for answer in told:
            if answer.steps:
                old = answer.window
                window = None if old is None or window is None else min(window, old)
        trees = [(r.url, tree) for r, t in zip(replicas, told, strict=True) for tree in t.trees]
        trees.sort(key=lambda one: -one[1].time)
        return View(
            at=now,
            replicas=[_replica_view(r, t, own) for r, t in zip(replicas, told, strict=True)],
            decisions=_decisions(grown),
            queue_depth=value(own, _DEPTH) or 0.0,
            queue_wait=histograms(grown).get((_WAIT, frozenset()), NOTHING),
            contexts=_contexts([answer.steps for answer in told]),
            trees=trees[:_SHOWN_TREES],
            window=window,
        )


def _replica_view(replica: Replica, told: _Told, own: Samples) -> ReplicaView:
    url = replica.url
    return ReplicaView(
        url=url,
        state=replica.state,
        in_flight=replica.in_flight,
        pool=told.pool,
        reserved=value(own, _RESERVED, replica=url),
        external=value(own, _EXTERNAL, replica=url),
        capacity=value(own, _CAPACITY, replica=url),
        why=told.why,
    )


def _decisions(samples: Samples) -> Mapping[tuple[str, str], float]:
    found = {
        (dict(labels)["decision"], dict(labels)["reason"]): amount
        for (sample, labels), amount in samples.items()
        if sample == _DECISIONS
    }
    return dict(sorted(found.items()))


def _contexts(parts: Sequence[Mapping[Key, Histogram]]) -> list[ContextView]:
    def whole(name: str, **labels: str) -> Histogram:
        key = name, frozenset(labels.items())
        return merged([part[key] for part in parts if key in part])

    found = [
        ContextView(
            bucket,
            whole("longleaf_commit_len", context_bucket=bucket),
            whole("longleaf_step_seconds", context_bucket=bucket, phase="total"),
            whole("longleaf_tree_nodes", context_bucket=bucket),
        )
        for bucket in CONTEXT_BUCKETS
    ]
    return [view for view in found if view.commit_len.count]
