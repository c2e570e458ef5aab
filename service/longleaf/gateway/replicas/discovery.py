"""Where replicas come from: a static list, or the endpoints of a Kubernetes Service.

A discovery reports the whole set of base URLs whenever it changes, and whether the source calls
each of them ready. That counts until the gateway's own checks have found it ready too: an engine
that answers but warms up is known to be unready by its pod's probe alone. Afterwards, and while the
source is away, replicas are judged by their own health, not by the cluster's.

The API is asked by the gateway's own HTTP client, not by the ``kubernetes`` package: two GETs are
all that is needed, while that package holds a thread for each watch, which nothing can end between
two events, and is a hundred megabytes with what it needs, in a service that stays under 150.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.replicas.kubernetes import EndpointSlices, KubernetesApi
from longleaf.metrics import GatewayMetrics

OnChange = Callable[[Mapping[str, bool]], None]
"""Gets base URLs, and whether each is called ready."""


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
        on_change(dict.fromkeys(self._urls, True))


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
