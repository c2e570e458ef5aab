"""The list of replicas: starts and stops their clients and health checks."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.replicas.breaker import CircuitBreaker
from longleaf.gateway.replicas.budget import ReplicaBudget, Rules
from longleaf.gateway.replicas.client import ReplicaClient
from longleaf.gateway.replicas.discovery import Discovery, make_discovery
from longleaf.gateway.replicas.health import watch
from longleaf.gateway.replicas.load_watch import expose, watch_loads
from longleaf.gateway.replicas.replica import Replica, ReplicaState
from longleaf.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2


def rules(config: GatewayConfig) -> Rules:
    """How the configuration says that replicas may be filled."""
    return Rules(
        config.max_prefill_tokens,
        config.short_prompt_tokens,
        None if config.tpot_ms is None else config.tpot_ms / 1e3,
        None if config.ttft_ms is None else config.ttft_ms / 1e3,
    )


class ReplicaRegistry:
    """The replicas that discovery reports. ``start`` inside the event loop, ``close`` at the end.

    A replica that discovery no longer reports gets nothing new; what runs on it may end.
    """

    def __init__(
        self, config: GatewayConfig, metrics: GatewayMetrics, discovery: Discovery | None = None
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._discovery = discovery or make_discovery(config, metrics)
        key = config.upstream_api_key
        self._secret = None if key is None else key.get_secret_value()
        self._tls = None
        if config.upstream_ca_file is not None:
            self._tls = ssl.create_default_context(cafile=config.upstream_ca_file)
        self._replicas: list[Replica] = []
        self._watches: dict[Replica, list[asyncio.Task[None]]] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._finding: asyncio.Task[None] | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called when a replica may have room again."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """All replicas, those that came first first."""
        return self._replicas

    def ready(self) -> list[Replica]:
        """Replicas that may take new requests."""
        return [replica for replica in self._replicas if replica.ready]

    def model_cards(self) -> list[Mapping[str, Any]]:
        """Model cards of the ready replicas, one a name (the first replica's wins)."""
        cards: dict[str, Mapping[str, Any]] = {}
        for replica in self.ready():
            if replica.facts is not None:
                for card in replica.facts.models:
                    cards.setdefault(str(card["id"]), card)
        return list(cards.values())

    async def start(self) -> None:
        """Begin to find replicas, and to check the health of each."""
        self._finding = asyncio.create_task(self._find())

    async def _find(self) -> None:
        await self._discovery.run(self.set_urls)

    def set_urls(self, urls: Mapping[str, bool]) -> None:
        """From now on, exactly these are the replicas; the source calls them ready, or not."""
        for replica in [one for one in self._replicas if one.url not in urls]:
            self._replicas.remove(replica)
            task = asyncio.create_task(self._retire(replica))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        known = {replica.url: replica for replica in self._replicas}
        for url, ready in urls.items():
            if url not in known:
                try:
                    known[url] = self._add(url)
                except ValueError as error:
                    fields = {"replica": url, "why": str(error)}
                    logger.error("replica without a usable URL", extra={"fields": fields})
                    continue
            known[url].announced = ready
        self.changed()

    def _add(self, url: str) -> Replica:
        config = self._config
        replica = Replica(
            url,
            ReplicaClient(url, config.connect_timeout, self._secret, self._tls),
            self._metrics,
            config.unhealthy_after,
            config.healthy_after,
            ReplicaBudget(rules(config), lambda: self.changed()),
            CircuitBreaker(config.breaker_failures, config.breaker_pause),
            config.max_connections,
        )
        self._replicas.append(replica)
        expose(replica, self._metrics)
        for state in get_args(ReplicaState):
            gauge = self._metrics.replica_state.labels(url, state)
            gauge.set_function(partial(_is, replica, state))
        self._watches[replica] = [
            asyncio.create_task(watch(replica, config)),
            asyncio.create_task(watch_loads(replica, config.loads_interval, config.health_timeout)),
        ]
        logger.info("replica found", extra={"fields": {"replica": url}})
        return replica

    async def _retire(self, replica: Replica) -> None:
        """Let what runs end, up to the drain limit."""
        replica.draining = True
        logger.info("replica leaves", extra={"fields": {"replica": replica.url}})
        await _end(self._watches.pop(replica))
        deadline = asyncio.get_running_loop().time() + self._config.drain_timeout
        while replica.in_flight and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
        await replica.close()
        if all(other.url != replica.url for other in self._replicas):
            self._metrics.forget_replica(replica.url)

    async def close(self) -> None:
        """Stop finding and checking, deliver pending aborts, close every connection."""
        tasks = [task for watches in self._watches.values() for task in watches]
        if self._finding is not None:
            tasks.append(self._finding)
        await _end([*tasks, *self._retiring])
        for replica in self._replicas:
            await replica.close()


def _is(replica: Replica, state: ReplicaState) -> float:
    return float(replica.state == state)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
