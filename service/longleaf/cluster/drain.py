"""Takes one engine out of a release, gateways first.

1. It is asked whether the engine could be evicted: disruption budgets hold.
2. The node is cordoned, so that the engine's successor starts elsewhere.
3. The engine leaves its Service: the label that the Service selects by is changed. Gateways follow
   the Service's EndpointSlices: they send it nothing new, and what runs on it goes on. That another
   engine serves is looked at once more: of two drains that begin together, neither goes on.
4. Every gateway that can be asked has let go of it.
5. It is evicted: its preStop and drain let running answers end.

What does not get to 5 is undone.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from longleaf.cluster.client import (
    SERVING,
    Cluster,
    ClusterError,
    EvictionRefusedError,
    Object,
    UnreachableError,
    is_ready,
    part_of,
)
from longleaf.cluster.undo import LOOK_SECONDS, Step, Undo, steadily

_UNDO_SECONDS = 60.0
"""For each step back, and for each change."""
_GRACE_SECONDS = 30
"""Kubernetes' own default."""
_AFTER_SECONDS = 60.0
"""Beyond the grace period, for the kubelet to end what is left."""
_EVICT_SECONDS = 5.0
"""Between two tries at an eviction, as kubectl does."""
_STATE = re.compile(r'^longleaf_gateway_replica_state\{replica="([^"]*)",state="(\w+)"\} 1', re.M)


class DrainError(RuntimeError):
    """The engine was not taken out; the message says why, and what is as it was."""


@dataclass(frozen=True, slots=True)
class DrainConfig:
    """cordon: its node too; only: even where no other engine serves; wait: until it is gone;
    seconds: for each of letting go, eviction and end; None: the pod's grace period, and a minute.
    """

    cordon: bool = True
    only: bool = False
    wait: bool = True
    seconds: float | None = None


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
        self._seconds = config.seconds or _GRACE_SECONDS + _AFTER_SECONDS

    def run(self, name: str) -> None:
        """Take out the engine of this name; ``DrainError``, ``ClusterError``."""
        engines = self._cluster.engines()
        if name not in engines:
            raise DrainError(f"no engine {name!r}: {', '.join(sorted(engines)) or 'there is none'}")
        pod = engines[name]
        uid, node = str(pod["metadata"]["uid"]), pod["spec"].get("nodeName")
        grace = pod["spec"].get("terminationGracePeriodSeconds", _GRACE_SECONDS)
        self._seconds = self._config.seconds or grace + _AFTER_SECONDS
        self._others_serve(name, engines)
        self._evict(name, uid, dry_run=True)
        undo = Undo(self._say, _UNDO_SECONDS)
        try:
            if self._config.cordon and node:
                self._cordon(node, undo)
            self._leave(name, undo)
            self._others_serve(name, steadily(self._cluster.engines, _UNDO_SECONDS))
            self._wait(lambda: not self._listed(name), f"{name} is still among the endpoints")
            self._gateways_let_go(str(pod.get("status", {}).get("podIP", "")))
            self._evict(name, uid)
            undo.forget()
        except BaseException:
            undo.run()
            raise
        self._say(f"{name} is evicted: running answers end")
        if self._config.wait:
            self._wait(lambda: self._uid(name) != uid, f"{name} still ends its answers")
            self._say(f"{name} is gone")
        if self._config.cordon and node:
            self._say(f"kubectl uncordon {node} lets engines come back")

    def _others_serve(self, name: str, engines: dict[str, Object]) -> None:
        others = [
            one
            for other, one in engines.items()
            if other != name
            and is_ready(one)
            and not one["metadata"].get("deletionTimestamp")
            and one["metadata"]["labels"].get(SERVING) != "false"
        ]
        if not others and not self._config.only:
            raise DrainError(
                f"no other engine is ready and serves: without {name} requests would find none "
                "(--only drains it all the same)"
            )

    def _cordon(self, node: str, undo: Undo) -> None:
        found = [one for one in self._cluster.nodes() if one["metadata"]["name"] == node]
        if not found:
            return
        if found[0]["spec"].get("unschedulable"):
            self._say(f"{node} was cordoned before, and stays so")
            return
        act = partial(self._cluster.cordon, node)
        back = Step(partial(act, False), f"{node} is uncordoned", f"kubectl uncordon {node}")
        undo.change(partial(act, True), back)
        self._say(f"{node} is cordoned")

    def _leave(self, name: str, undo: Undo) -> None:
        act = partial(self._cluster.label_pod, name, SERVING)
        command = (
            f"kubectl -n {self._cluster.namespace} label --overwrite pod {name} {SERVING}=true"
        )
        back = Step(partial(act, "true"), f"{name} serves again: nothing was evicted", command)
        undo.change(partial(act, "false"), back)
        self._say(f"{name} leaves its Service")

    def _listed(self, name: str) -> bool:
        service, _, _ = name.rpartition("-")
        endpoints = self._cluster.endpoints(service)
        return any((one.get("targetRef") or {}).get("name") == name for one in endpoints)

    def _gateways_let_go(self, address: str) -> None:
        for gateway in steadily(self._cluster.pods, self._seconds):
            if part_of(gateway) != "gateway" or not is_ready(gateway) or not address:
                continue
            name = gateway["metadata"]["name"]
            try:
                self._wait(
                    partial(self._has_let_go, name, address),
                    f"gateway {name} still sends to {address}",
                )
            except ClusterError as error:
                self._say(f"{name} cannot be asked ({error}): it follows the endpoints by itself")
            else:
                self._say(f"{name} has let go")

    def _has_let_go(self, gateway: str, address: str) -> bool:
        host = f"[{address}]" if ":" in address else address
        states = replica_states(self._metrics(gateway))
        return all(
            state == "draining"
            for url, state in states.items()
            if url.startswith(f"http://{host}:")
        )

    def _metrics(self, gateway: str) -> str:
        """Asked twice where no answer comes, once the API server is known to give answers."""
        try:
            return self._cluster.gateway_metrics(gateway)
        except UnreachableError:
            steadily(self._cluster.pods, self._seconds)
        try:
            return self._cluster.gateway_metrics(gateway)
        except UnreachableError as error:
            raise ClusterError(str(error)) from error

    def _evict(self, name: str, uid: str, *, dry_run: bool = False) -> None:
        deadline = time.monotonic() + self._seconds
        act = partial(self._cluster.evict, name, uid, dry_run=dry_run)
        while True:
            try:
                return steadily(act, self._seconds)
            except EvictionRefusedError as error:
                if time.monotonic() + _EVICT_SECONDS > deadline:
                    raise DrainError(f"the eviction is refused: {error}") from error
                self._say(f"waiting: {error}")
                time.sleep(_EVICT_SECONDS)
            except UnreachableError:
                raise
            except ClusterError:
                # Asked again after an answer that got lost, it is gone by now.
                if not dry_run and steadily(partial(self._uid, name), self._seconds) != uid:
                    return None
                raise

    def _uid(self, name: str) -> str | None:
        pod = self._cluster.pod(name)
        return None if pod is None else str(pod["metadata"]["uid"])

    def _wait(self, done: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + self._seconds
        while not steadily(done, self._seconds):
            if time.monotonic() > deadline:
                raise DrainError(f"after {self._seconds:.0f} s, {otherwise}")
            time.sleep(LOOK_SECONDS)
