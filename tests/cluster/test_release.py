"""Install, upgrade, rollback, uninstall; what the server refuses."""

import subprocess
from typing import Any

import pytest
from click.testing import CliRunner

from longleaf.cluster.command import cluster_command
from tests.charts.rendering import SHAPES, HelmError, Rendered
from tests.cluster.control_plane import ApiError, ControlPlane, eventually
from tests.cluster.releases import Releases

GATEWAY = "deployments/chat-longleaf-gateway"
ENGINE = "statefulsets/chat-longleaf-engine"


@pytest.mark.parametrize("major", ["3", "4"])
def test_life_of_a_release(plane: ControlPlane, releases: Releases, major: str) -> None:
    namespace = f"life-{major}"
    said = releases.apply("install", namespace, "minimal", major=major)
    assert "/v1/chat/completions" in said
    eventually(
        lambda: len([name for name in releases.objects(namespace) if "pods/" in name]) == 2,
        "one engine and one gateway pod are made",
    )
    first = releases.objects(namespace)
    assert {GATEWAY, ENGINE} <= set(first)

    values = {"longestRequestSeconds": 240, "engine__replicas": 2}
    releases.apply("upgrade", namespace, "minimal", major=major, **values)
    second = releases.objects(namespace)
    spec = second[GATEWAY]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 240 + 10 + 30
    assert second[GATEWAY]["metadata"]["generation"] == 2
    assert second[ENGINE]["spec"]["replicas"] == 2
    # The new gateway is not ready, so the old one stays: a rollout takes none away.
    sets = f"/apis/apps/v1/namespaces/{namespace}/replicasets"
    eventually(
        lambda: sorted(one["spec"]["replicas"] for one in plane.items(sets).values()) == [1, 1],
        "old and new gateway stand side by side",
    )

    releases.helm("rollback", "chat", "1", "-n", namespace, major=major)
    third = releases.objects(namespace)
    for name in (GATEWAY, ENGINE):
        assert third[name]["spec"]["template"]["spec"] == first[name]["spec"]["template"]["spec"]
    assert third[ENGINE]["spec"]["replicas"] == 1
    listed = releases.helm("list", "-n", namespace, "-o", "json", major=major)
    assert '"revision":"3"' in listed

    releases.helm("uninstall", "chat", "-n", namespace, major=major)
    eventually(
        lambda: all(name.startswith("pods/") for name in releases.objects(namespace)),
        "nothing but pods, which no kubelet ends, is left",
    )


def test_what_kubernetes_changes_in_no_object_is_refused_before_anything_changes(
    plane: ControlPlane, releases: Releases
) -> None:
    """Half an upgrade would leave Services that select nobody."""
    namespace = "kept"
    named: dict[str, Any] = {"fullnameOverride": "chat-kept"}
    releases.apply("install", namespace, "multi-node", **named)
    eventually(
        lambda: len([name for name in releases.objects(namespace) if "pods/" in name]) == 7,
        "four engines and three gateways are made",
    )
    before = releases.objects(namespace)

    def refused(shape: str, **values: Any) -> str:
        with pytest.raises(HelmError) as caught:
            releases.apply("upgrade", namespace, shape, **named, **values)
        return str(caught.value)

    assert "give the nameOverride that it was installed with" in refused(
        "multi-node", nameOverride="another"
    )
    orphan = ("delete", "statefulset", "chat-kept-engine", "--cascade=orphan")
    command = " ".join(("kubectl", "-n", namespace, *orphan))
    for shape, values in (
        ("multi-node", {"model__volume__size": "2Ti"}),
        ("multi-node", {"model__volume__storageClassName": "another"}),
        ("default", {}),
        ("minimal", {}),
    ):
        said = refused(shape, **values)
        assert f"Kubernetes changes no claims of a StatefulSet: {command} keeps its pods" in said
    after = releases.objects(namespace)
    assert {name: one["spec"] for name, one in after.items() if "spec" in one} == {
        name: one["spec"] for name, one in before.items() if "spec" in one
    }

    # The same size in other words is no change; and the command that is named helps.
    releases.apply("upgrade", namespace, "multi-node", **named, model__volume__size="1024Gi")
    pods = {name for name in releases.objects(namespace) if name.startswith("pods/chat-kept-eng")}
    assert len(pods) == 4
    config = ("--kubeconfig", plane.kubeconfig, "-n", namespace)
    kubectl = releases.tools.folder / "bin" / "kubectl"
    subprocess.run([kubectl, *config, *orphan], check=True, capture_output=True)
    releases.apply("upgrade", namespace, "multi-node", **named, model__volume__size="2Ti")
    found = releases.objects(namespace)
    assert pods <= set(found)
    (claim,) = found["statefulsets/chat-kept-engine"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Ti"
    releases.helm("uninstall", "chat", "-n", namespace)


def test_a_reinstalled_release_finds_its_claims(plane: ControlPlane, releases: Releases) -> None:
    namespace = "again"
    claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    selector = "?labelSelector=app.kubernetes.io/instance%3Dchat"
    releases.apply("install", namespace, "multi-node")
    eventually(lambda: len(plane.items(claims + selector)) == 4, "each engine has a claim")
    before = {name: one["metadata"]["uid"] for name, one in plane.items(claims).items()}
    releases.helm("uninstall", "chat", "-n", namespace)
    plane.remove_all(f"/api/v1/namespaces/{namespace}/pods")
    releases.apply("install", namespace, "multi-node")
    eventually(
        lambda: "pods/chat-longleaf-engine-3" in releases.objects(namespace), "engines are made"
    )
    found = plane.items(claims + selector)
    assert {name: one["metadata"]["uid"] for name, one in found.items()} == before
    releases.helm("uninstall", "chat", "-n", namespace)


def test_status_tells_why_pods_are_not_made_or_placed(
    plane: ControlPlane, releases: Releases
) -> None:
    namespace = "waiting"
    releases.apply("install", namespace, "default", engine__runtimeClassName="nowhere")
    options = ("-n", namespace, "--release", "chat", "--kubeconfig", str(plane.kubeconfig))

    def told() -> str | None:
        done = CliRunner().invoke(cluster_command, [*options, "status"])
        assert done.exit_code == 0, done.output
        assert done.stderr == ""
        said = done.stdout.partition("PRODUCT")[2]
        return said if "chat-longleaf-engine has" in said and "nodes available" in said else None

    said = eventually(told, "status tells of engine and gateways")
    (engine,) = (line for line in said.splitlines() if "chat-longleaf-engine " in line)
    assert engine.startswith("chat-longleaf-engine has 0 of 1 pods: ")
    assert 'RuntimeClass "nowhere" not found' in engine
    releases.helm("uninstall", "chat", "-n", namespace)


PATHS = {
    "Deployment": "apis/apps/v1/namespaces/{}/deployments",
    "StatefulSet": "apis/apps/v1/namespaces/{}/statefulsets",
    "Ingress": "apis/networking.k8s.io/v1/namespaces/{}/ingresses",
    "NetworkPolicy": "apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "Role": "apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "PriorityClass": "apis/scheduling.k8s.io/v1/priorityclasses",
    "Service": "api/v1/namespaces/{}/services",
    "ServiceAccount": "api/v1/namespaces/{}/serviceaccounts",
    "Pod": "api/v1/namespaces/{}/pods",
}
UNKNOWN = {"PodDisruptionBudget", "HorizontalPodAutoscaler"}
"""At the versions that the chart writes, to 1.20."""
CUSTOM = {"HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject", "ServiceMonitor"}


def _dry_run(plane: ControlPlane, rendered: Rendered) -> dict[str, str]:
    """What the server says against each object, were it made now; by kind."""
    faults = {}
    for one in rendered.objects:
        if one["kind"] in UNKNOWN | CUSTOM or one["metadata"]["name"].endswith("-dashboards"):
            continue
        path = PATHS[one["kind"]].format("default")
        body = {**one, "metadata": {**one["metadata"], "namespace": "default"}}
        if one["kind"] == "PriorityClass":
            del body["metadata"]["namespace"]
        if one["kind"] == "Pod":  # names the default account of a namespace: made by now
            body["spec"]["serviceAccountName"] = "default"
        try:
            plane.ask("POST", f"/{path}?dryRun=All", body)
        except ApiError as error:
            faults[one["kind"]] = str(error)
    return faults


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_server_takes_every_shape(plane: ControlPlane, releases: Releases, shape: str) -> None:
    assert _dry_run(plane, releases.tools.template(shape)) == {}


@pytest.mark.parametrize(
    ("shape", "name", "value", "kind", "said"),
    [
        ("default", "gateway.extraEnv", [{"name": "1 BAD"}], "Deployment", "env[0].name"),
        (
            "default",
            "gateway.extraVolumeMounts",
            [{"name": "nowhere", "mountPath": "/x"}],
            "Deployment",
            "volumeMounts[1].name",
        ),
        ("default", "gateway.podSecurityContext.fsGroup", 1 << 40, "Deployment", "fsGroup"),
        (
            "default",
            "networkPolicy.apiServerCidrs",
            ["10.0.0.0/99"],
            "NetworkPolicy",
            "not a valid CIDR",
        ),
    ],
)
def test_the_server_refuses_what_no_schema_of_values_sees(
    plane: ControlPlane,
    releases: Releases,
    shape: str,
    name: str,
    value: object,
    kind: str,
    said: str,
) -> None:
    faults = _dry_run(plane, releases.tools.template(shape, {name: value}))
    assert said in faults[kind]
