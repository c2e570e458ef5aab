"""Takes one engine out of a release, gateways first.

1. The node is cordoned, so that the engine's successor starts elsewhere.
2. The engine leaves its Service: the label that the Service selects by is changed. Gateways follow
   the Service's EndpointSlices: they send it nothing new, and what runs on it goes on.
3. Every gateway that can be asked has let go of it.
4. It is evicted: disruption budgets hold, and its preStop and drain let running answers end.

What does not get to 4 is undone.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from longleaf.cluster.client import (
    SERVING,
    Cluster,
    ClusterError,
    EvictionRefusedError,
    is_ready,
    part_of,
)

_LOOK_SECONDS = 0.5
_EVICT_SECONDS = 5.0
"""Between two tries at an eviction, as kubectl does."""
_STATE = re.compile(r'^longleaf_gateway_replica_state\{replica="([^"]*)",state="(\w+)"\} 1', re.M)


class DrainError(RuntimeError):
    """The engine was not taken out; the message says why, and what is as it was."""


@dataclass(frozen=True, slots=True)
class DrainConfig:
    """cordon: its node too; only: even where no other engine is ready; wait: until it is gone;
    seconds: for each of letting go, eviction and end.
    """

    cordon: bool = True
    only: bool = False
    wait: bool = True
    seconds: float = 4000.0


def replica_states(metrics: str) -> dict[str, str]:
    """State of each replica, by base URL, as a gateway's /metrics tells it."""
    return dict(_STATE.findall(metrics))


class Drain:
    """One engine on its way out. say: where each step is told."""

    def __init__(
        self, cluster: Cluster, config: DrainConfig, say: Callable[[str], object] = print
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._say = say

    def run(self, name: str) -> None:
        """Take out the engine of this name; ``DrainError``, ``ClusterError``."""
        engines = self._cluster.engines()
        if name not in engines:
            raise DrainError(f"no engine {name!r}: {', '.join(sorted(engines)) or 'there is none'}")
        pod = engines[name]
        others = [
            one["metadata"]["name"]
            for one in engines.values()
            if one is not pod and is_ready(one) and not one["metadata"].get("deletionTimestamp")
        ]
        if not others and not self._config.only:
            raise DrainError(
                f"no other engine is ready: without {name} requests would find none (--only drains "
                "it all the same)"
            )
        node = pod["spec"].get("nodeName")
        cordoned = self._config.cordon and bool(node) and self._cordon(node)
        try:
            self._cluster.label_pod(name, SERVING, "false")
            self._say(f"{name} leaves its Service")
            self._wait(lambda: not self._listed(name), f"{name} is still among the endpoints")
            self._gateways_let_go(str(pod.get("status", {}).get("podIP", "")))
            self._evict(name)
        except BaseException:
            self._cluster.label_pod(name, SERVING, "true")
            if cordoned:
                self._cluster.cordon(node, False)
            self._say(f"{name} serves again: nothing was evicted")
            raise
        if self._config.wait:
            uid = pod["metadata"]["uid"]
            self._wait(lambda: self._uid(name) != uid, f"{name} still ends its answers")
            self._say(f"{name} is gone")
        if cordoned:
            self._say(f"kubectl uncordon {node} lets engines come back")

    def _cordon(self, node: str) -> bool:
        """Returns whether it was not cordoned before."""
        found = [one for one in self._cluster.nodes() if one["metadata"]["name"] == node]
        if not found or found[0]["spec"].get("unschedulable"):
            return False
        self._cluster.cordon(node, True)
        self._say(f"{node} is cordoned")
        return True

    def _listed(self, name: str) -> bool:
        service, _, _ = name.rpartition("-")
        endpoints = self._cluster.endpoints(service)
        return any((one.get("targetRef") or {}).get("name") == name for one in endpoints)

    def _gateways_let_go(self, address: str) -> None:
        for gateway in self._cluster.pods():
            if part_of(gateway) != "gateway" or not is_ready(gateway) or not address:
                continue
            name = gateway["metadata"]["name"]
            try:
                self._wait(
                    lambda name=name: self._has_let_go(name, address),  # type: ignore[misc]
                    f"gateway {name} still sends to {address}",
                )
            except ClusterError as error:
                self._say(f"{name} cannot be asked ({error}): it follows the endpoints by itself")
            else:
                self._say(f"{name} has let go")

    def _has_let_go(self, gateway: str, address: str) -> bool:
        host = f"[{address}]" if ":" in address else address
        states = replica_states(self._cluster.gateway_metrics(gateway))
        return all(
            state == "draining"
            for url, state in states.items()
            if url.startswith(f"http://{host}:")
        )

    def _evict(self, name: str) -> None:
        deadline = time.monotonic() + self._config.seconds
        while True:
            try:
                self._cluster.evict(name)
            except EvictionRefusedError as error:
                if time.monotonic() + _EVICT_SECONDS > deadline:
                    raise DrainError(f"the eviction is refused: {error}") from error
                self._say(f"waiting: {error}")
                time.sleep(_EVICT_SECONDS)
            else:
                self._say(f"{name} is evicted: running answers end")
                return

    def _uid(self, name: str) -> str | None:
        pod = self._cluster.pod(name)
        return None if pod is None else str(pod["metadata"]["uid"])

    def _wait(self, done: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + self._config.seconds
        while not done():
            if time.monotonic() > deadline:
                raise DrainError(f"after {self._config.seconds:.0f} s, {otherwise}")
            time.sleep(_LOOK_SECONDS)
