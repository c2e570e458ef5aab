"""Where replicas come from: a static list, or the endpoints of a Kubernetes Service.

A discovery reports the whole set of base URLs whenever it changes. While its source is away the
last set stands: replicas are judged by their own health, not by the cluster's.
"""

from collections.abc import Callable, Collection
from typing import Protocol

from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.replicas.kubernetes import EndpointSlices, KubernetesApi
from longleaf.metrics import GatewayMetrics

OnChange = Callable[[Collection[str]], None]


class Discovery(Protocol):
    """Reports sets of base URLs."""

    async def run(self, on_change: OnChange) -> None:
        """Report the first set, then every further one; may return when there is none to come."""
        ...


class StaticList:
    """The configured replicas."""

    def __init__(self, urls: Collection[str]) -> None:
        self._urls = urls

    async def run(self, on_change: OnChange) -> None:
        """Report them, once."""
        on_change(self._urls)


def make_discovery(config: GatewayConfig, metrics: GatewayMetrics) -> Discovery:
    """The configured discovery. ``ValueError`` where the cluster cannot be told."""
    if config.kubernetes_service is None:
        return StaticList(config.replicas)
    api = KubernetesApi.configured(
        config.kubernetes_api, config.kubernetes_token_file, config.kubernetes_ca_file
    )
    namespace, _, service = config.kubernetes_service.rpartition("/")
    return EndpointSlices(
        api,
        namespace or api.namespace,
        service,
        config.kubernetes_port,
        config.kubernetes_scheme,
        metrics.discovery_up.set,
    )
