"""The list of replicas: starts and stops their clients and health checks."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.replicas.budget import ReplicaBudget, Rules
from longleaf.gateway.replicas.client import ReplicaClient
from longleaf.gateway.replicas.health import watch
from longleaf.gateway.replicas.load_watch import expose, watch_loads
from longleaf.gateway.replicas.replica import Replica
from longleaf.metrics import GatewayMetrics


def rules(config: GatewayConfig) -> Rules:
    """How the configuration says that replicas may be filled."""
    return Rules(
        config.max_prefill_tokens,
        config.short_prompt_tokens,
        None if config.tpot_ms is None else config.tpot_ms / 1e3,
        None if config.ttft_ms is None else config.ttft_ms / 1e3,
    )


class ReplicaRegistry:
    """A static list of replicas. ``start`` inside the event loop, ``close`` at the end."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._replicas: list[Replica] = []
        self._watches: list[asyncio.Task[None]] = []
        self.changed: Callable[[], None] = lambda: None
        """Called when a replica may have room again."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """All replicas, in the order of the configuration."""
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
        """Open a client for each replica and begin to check its health."""
        config = self._config
        key = config.upstream_api_key
        secret = None if key is None else key.get_secret_value()
        for url in config.replicas:
            client = ReplicaClient(url, config.connect_timeout, secret)
            replica = Replica(
                url,
                client,
                self._metrics,
                config.unhealthy_after,
                config.healthy_after,
                ReplicaBudget(rules(config), lambda: self.changed()),
            )
            self._replicas.append(replica)
            self._watches.append(asyncio.create_task(watch(replica, config)))
            expose(replica, self._metrics)
            loads = watch_loads(replica, config.loads_interval)
            self._watches.append(asyncio.create_task(loads))

    async def close(self) -> None:
        """Stop the health checks, deliver pending aborts, close every connection."""
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for replica in self._replicas:
            await replica.close()
