"""What an autoscaler set stays, through the upgrade that brings it and those that follow."""

from collections.abc import Iterator

import pytest

from tests.cluster.control_plane import ControlPlane, eventually
from tests.cluster.releases import Releases

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAME = "scaledobjects.keda.sh"
NAMES = {"plural": "scaledobjects", "singular": "scaledobject", "kind": "ScaledObject"}
SCHEMA = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
KEDA = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": NAME},
    "spec": {
        "group": "keda.sh",
        "scope": "Namespaced",
        "names": NAMES,
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": SCHEMA},
            }
        ],
    },
}


@pytest.fixture(scope="module", autouse=True)
def keda(plane: ControlPlane) -> Iterator[None]:
    """The kind that the chart writes for KEDA; no operator acts on it."""
    plane.ask("POST", CRDS, KEDA)
    eventually(
        lambda: plane.find("/apis/keda.sh/v1alpha1/namespaces/default/scaledobjects"),
        "scaled objects are known",
    )
    yield
    plane.remove(f"{CRDS}/{NAME}")


@pytest.mark.parametrize("major", ["3", "4"])
@pytest.mark.parametrize(
    ("target", "kind"), [("engine", "statefulsets"), ("gateway", "deployments")]
)
def test_an_upgrade_keeps_what_the_autoscaler_set(
    plane: ControlPlane, releases: Releases, target: str, kind: str, major: str
) -> None:
    namespace = f"scaled-{target}-{major}"
    path = f"/apis/apps/v1/namespaces/{namespace}/{kind}/chat-longleaf-{target}"

    def replicas() -> int:
        return int(plane.ask("GET", path)["spec"]["replicas"])

    releases.apply("install", namespace, "minimal", major=major, **{f"{target}__replicas": 4})
    try:
        keda = {"keda__enabled": True, "keda__target": target}
        releases.apply("upgrade", namespace, "minimal", major=major, **keda)
        assert replicas() == 4
        # As a HorizontalPodAutoscaler does.
        kind = "application/merge-patch+json"
        plane.ask("PATCH", f"{path}/scale", {"spec": {"replicas": 3}}, kind=kind)
        values = {**keda, f"{target}__replicas": 2, "gateway__queueSize": 99}
        releases.apply("upgrade", namespace, "minimal", major=major, **values)
        assert replicas() == 3
    finally:
        releases.helm("uninstall", "chat", "-n", namespace, major=major)
