"""One release in a cluster, through the ``kubernetes`` client and the user's own kubeconfig.

Objects are the API server's JSON as it comes: the client's typed models refuse what a newer or an
older server writes, and nothing here needs them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config

SERVING = "longleaf.dev/serving"
"""Label of engine pods that the engines' Service selects by, beside the release's own."""
_PART = "app.kubernetes.io/component"
_SECONDS = 30.0
_GATEWAY_SECONDS = 5.0

Object = Mapping[str, Any]


class ClusterError(RuntimeError):
    """The cluster cannot be reached, or refused; the message says what."""


class UnreachableError(ClusterError):
    """No answer, or one that says that there will be one later: worth another try."""


class RefusedError(ClusterError):
    """The account may not do this."""


class EvictionRefusedError(ClusterError):
    """A disruption budget allows no pod to go now."""


@contextmanager
def _told() -> Iterator[None]:
    """Errors of the client as one sentence."""
    try:
        yield
    except client.ApiException as error:
        raise _kind(error.status or 0)(_message(error)) from error
    except urllib3.exceptions.HTTPError as error:
        raise UnreachableError(f"the API server cannot be reached: {error}") from error


def _kind(status: int) -> type[ClusterError]:
    if status == 429:
        return EvictionRefusedError
    if status == 403:
        return RefusedError
    return UnreachableError if status >= 500 else ClusterError


def _message(error: client.ApiException) -> str:
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body
    try:
        said = json.loads(body or "")["message"]
    except (ValueError, KeyError, TypeError):
        said = error.reason
    return f"the API server answered {error.status}: {said}"


class Cluster:
    """One release. ``close`` ends the connections."""

    def __init__(self, api: client.ApiClient, namespace: str, release: str) -> None:
        self.namespace = namespace
        self.release = release
        self._api = api
        self._core = client.CoreV1Api(api)
        self._apps = client.AppsV1Api(api)
        self._discovery = client.DiscoveryV1Api(api)
        self._networking = client.NetworkingV1Api(api)

    @classmethod
    def connected(
        cls, kubeconfig: Path | None, context: str | None, namespace: str, release: str
    ) -> "Cluster":
        """By a kubeconfig, default: what kubectl takes; ``ClusterError``.

        In a pod that has none, by the pod's own service account.
        """
        try:
            try:
                api = config.new_client_from_config(  # type: ignore[no-untyped-call]
                    None if kubeconfig is None else str(kubeconfig), context
                )
            except config.ConfigException:
                if kubeconfig or context:
                    raise
                settings = client.Configuration()
                config.load_incluster_config(settings)  # type: ignore[no-untyped-call]
                api = client.ApiClient(settings)
        except Exception as error:  # a file that is no kubeconfig fails the client in many ways
            raise ClusterError(f"no cluster is configured: {error}") from error
        return cls(api, namespace, release)

    def close(self) -> None:
        """End the connections."""
        self._api.close()  # type: ignore[no-untyped-call]

    def pods(self) -> list[Object]:
        """Pods of the release."""
        return self._of_release(self._core.list_namespaced_pod)

    def expect_release(self) -> None:
        """``ClusterError`` where neither pods nor stateful sets carry the release's label."""
        if not self.pods() and not self.stateful_sets():
            raise ClusterError(
                f"there is no release {self.release!r} in namespace {self.namespace!r} "
                "(--release, -n; helm list -A shows what there is)"
            )

    def engines(self) -> dict[str, Object]:
        """Engine pods of the release by name."""
        return {one["metadata"]["name"]: one for one in self.pods() if part_of(one) == "engine"}

    def nodes(self) -> list[Object]:
        """Nodes of the cluster."""
        return self._list(self._core.list_node)

    def stateful_sets(self) -> list[Object]:
        """Stateful sets of the release: engines, probes."""
        return self._of_release(self._apps.list_namespaced_stateful_set)

    def deployments(self) -> list[Object]:
        """Deployments of the release: gateways."""
        return self._of_release(self._apps.list_namespaced_deployment)

    def events(self) -> list[Object]:
        """What happened in the namespace of late."""
        return self._list(self._core.list_namespaced_event, self.namespace)

    def objects(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Name and reader of what describes the release, its nodes and what happened."""
        yield "pods", self.pods
        yield "statefulsets", self.stateful_sets
        yield "deployments", self.deployments
        for name, ask in (
            ("services", self._core.list_namespaced_service),
            ("endpointslices", self._discovery.list_namespaced_endpoint_slice),
            ("networkpolicies", self._networking.list_namespaced_network_policy),
        ):
            yield name, partial(self._of_release, ask)
        yield "events", self.events
        yield "nodes", self.nodes
        yield "version", partial(self._read, client.VersionApi(self._api).get_code)

    def endpoints(self, service: str) -> list[Object]:
        """Endpoints of a Service."""
        slices = self._list(
            self._discovery.list_namespaced_endpoint_slice,
            self.namespace,
            label_selector=f"kubernetes.io/service-name={service}",
        )
        return [one for found in slices for one in found.get("endpoints") or ()]

    def pod(self, name: str) -> Object | None:
        """A pod, or None."""
        return next((one for one in self.pods() if one["metadata"]["name"] == name), None)

    def label_pod(self, name: str, label: str, value: str) -> None:
        """Set a label of a pod."""
        body = {"metadata": {"labels": {label: value}}}
        with _told():
            self._core.patch_namespaced_pod(
                name, self.namespace, body, _preload_content=False, _request_timeout=_SECONDS
            )

    def cordon(self, node: str, unschedulable: bool) -> None:
        """Keep new pods off a node, or let them come again."""
        body = {"spec": {"unschedulable": unschedulable}}
        with _told():
            self._core.patch_node(node, body, _preload_content=False, _request_timeout=_SECONDS)

    def evict(self, pod: str, uid: str, *, dry_run: bool = False) -> None:
        """End the pod of this name and uid in order, or ask whether it could be.

        ``EvictionRefusedError`` where a disruption budget forbids it.
        """
        body = client.V1Eviction(
            api_version="policy/v1",
            kind="Eviction",
            metadata=client.V1ObjectMeta(name=pod, namespace=self.namespace),
            delete_options=client.V1DeleteOptions(
                preconditions=client.V1Preconditions(uid=uid),
                dry_run=["All"] if dry_run else None,
            ),
        )
        with _told():
            self._core.create_namespaced_pod_eviction(
                pod, self.namespace, body, _preload_content=False, _request_timeout=_SECONDS
            )

    def log(self, pod: str, container: str, lines: int) -> str:
        """The last lines that a container wrote."""
        ask = partial(self._core.read_namespaced_pod_log, container=container, tail_lines=lines)
        return self._text(ask, pod, self.namespace)

    def gateway_metrics(self, pod: str) -> str:
        """What a gateway's /metrics says, through the API server; the account needs pods/proxy."""
        ask = self._core.connect_get_namespaced_pod_proxy_with_path
        return self._text(ask, f"{pod}:9080", self.namespace, "metrics", seconds=_GATEWAY_SECONDS)

    def _of_release(self, ask: Callable[..., Any]) -> list[Object]:
        selector = f"app.kubernetes.io/instance={self.release}"
        return self._list(ask, self.namespace, label_selector=selector)

    def _list(self, ask: Callable[..., Any], *where: str, **selected: str) -> list[Object]:
        items: list[Object] = self._read(ask, *where, **selected)["items"]
        return items

    def _read(self, ask: Callable[..., Any], *where: str, **selected: str) -> Any:
        return json.loads(self._text(partial(ask, **selected), *where))

    @staticmethod
    def _text(ask: Callable[..., Any], *where: str, seconds: float = _SECONDS) -> str:
        with _told():
            answer = ask(*where, _preload_content=False, _request_timeout=seconds)
            return str(answer.data.decode(errors="replace"))


def part_of(pod: Object) -> str:
    """engine, gateway, probe or test; "-" for what is none of the release's."""
    return str(pod["metadata"].get("labels", {}).get(_PART, "-"))


def is_ready(one: Object) -> bool:
    """Whether a pod, or a node, is ready."""
    conditions = one.get("status", {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
