"""Who may speak to whom: the rendered NetworkPolicies, evaluated as Kubernetes documents them."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.charts.rendering import Rendered, Tools, container


@dataclass(frozen=True)
class Peer:
    """A pod by its labels and those of its namespace, or an address outside the cluster."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = "serving"
    address: str | None = None


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return dict(selector.get("matchLabels") or {}).items() <= dict(labels).items()


def _is_peer(rule: Mapping[str, Any], peer: Peer) -> bool:
    if "ipBlock" in rule:
        block = ipaddress.ip_network(rule["ipBlock"]["cidr"])
        return peer.address is not None and ipaddress.ip_address(peer.address) in block
    if peer.address is not None:
        return False
    name = {"kubernetes.io/metadata.name": peer.namespace}
    inside = (
        _selects(rule["namespaceSelector"], name)
        if "namespaceSelector" in rule
        else peer.namespace == "serving"
    )
    return inside and _selects(rule.get("podSelector") or {}, peer.labels)


def _passes(rendered: Rendered, pod: Peer, way: str, peer: Peer, port: tuple[str, int]) -> bool:
    """Whether a pod's policies of one direction ("Ingress", "Egress") let a connection through."""
    if pod.address is not None or pod.namespace != "serving":
        return True
    policies = [one["spec"] for one in rendered.objects if one["kind"] == "NetworkPolicy"]
    own = [
        one
        for one in policies
        if way in one["policyTypes"] and _selects(one["podSelector"], pod.labels)
    ]
    side = "from" if way == "Ingress" else "to"
    return not own or any(
        port in [(entry["protocol"], entry["port"]) for entry in rule["ports"]]
        and (side not in rule or any(_is_peer(one, peer) for one in rule[side]))
        for policy in own
        for rule in policy.get(way.lower()) or ()
    )


def _reaches(rendered: Rendered, source: Peer, target: Peer, port: int, kind: str = "TCP") -> bool:
    return _passes(rendered, source, "Egress", target, (kind, port)) and _passes(
        rendered, target, "Ingress", source, (kind, port)
    )


def _pods(rendered: Rendered) -> tuple[Peer, Peer, Peer]:
    """Engine, gateway and test pod."""
    templates = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in (rendered.engines, rendered.of("Deployment"))
    ]
    return Peer(templates[0]), Peer(templates[1]), Peer(rendered.of("Pod")["metadata"]["labels"])


OTHER = Peer({"app": "other"})
STRANGER = Peer({"app": "other"}, "elsewhere")
PROMETHEUS = Peer({"app": "prometheus"}, "monitoring")
DNS = Peer({"k8s-app": "kube-dns"}, "kube-system")
OUTSIDE = Peer(address="203.0.113.9")
API = Peer(address="10.0.0.1")


def test_what_is_needed_passes(default: Rendered) -> None:
    engine, gateway, test = _pods(default)
    public = container(default.gateway, "gateway")["ports"][0]["containerPort"]
    assert _reaches(default, gateway, engine, 30000)
    assert _reaches(default, gateway, API, 6443)
    assert _reaches(default, gateway, Peer(address="fd00::1"), 443)
    assert _reaches(default, test, gateway, public)
    assert _reaches(default, STRANGER, gateway, public)
    assert _reaches(default, OUTSIDE, gateway, public)
    assert _reaches(default, PROMETHEUS, gateway, 9080)
    assert _reaches(default, PROMETHEUS, engine, 30000)
    for pod in (engine, gateway, test):
        assert _reaches(default, pod, DNS, 53, "UDP")


def test_nothing_else_passes(default: Rendered) -> None:
    engine, gateway, test = _pods(default)
    for source, target, port in (
        *((one, engine, 30000) for one in (OTHER, STRANGER, OUTSIDE, test, engine)),
        *((one, gateway, 9080) for one in (OTHER, STRANGER, OUTSIDE, test, engine)),
        (engine, gateway, 8080),
        (engine, OUTSIDE, 443),
        (engine, API, 6443),
        (gateway, engine, 9400),
        (gateway, OUTSIDE, 80),
        (gateway, OTHER, 443),
        (test, engine, 30000),
        (test, API, 443),
        (PROMETHEUS, engine, 9400),
    ):
        assert not _reaches(default, source, target, port), (source, target, port)


def test_a_probe_reaches_engines_and_is_scraped(default: Rendered, full: Rendered) -> None:
    engine, gateway, test = _pods(full)
    labels = full.of("StatefulSet", "chat-longleaf-probe")["spec"]["template"]["metadata"]["labels"]
    probe = Peer(labels)
    assert _reaches(full, probe, engine, 30000)
    assert _reaches(full, probe, DNS, 53, "UDP")
    assert _reaches(full, PROMETHEUS, probe, 9401)
    for source, target, port in (
        *((one, probe, 9401) for one in (OTHER, STRANGER, OUTSIDE, engine, gateway, test)),
        (probe, gateway, 8080),
        (probe, engine, 9400),
        (probe, OUTSIDE, 443),
        (probe, API, 6443),
    ):
        assert not _reaches(full, source, target, port), (source, target, port)
    assert not _reaches(default, probe, _pods(default)[0], 30000)


def test_lists_are_closed_where_they_are_given(full: Rendered) -> None:
    engine, gateway, test = _pods(full)
    ingress = Peer({"app": "nginx"}, "ingress-nginx")
    assert _reaches(full, ingress, gateway, 8080)
    assert _reaches(full, test, gateway, 8080)
    assert not _reaches(full, STRANGER, gateway, 8080)
    assert not _reaches(full, OUTSIDE, gateway, 8080)
    assert _reaches(full, gateway, API, 6443)
    assert not _reaches(full, gateway, Peer(address="10.0.0.2"), 6443)
    assert _reaches(full, gateway, Peer({"app": "otel"}, "monitoring"), 4318)
    assert _reaches(full, PROMETHEUS, engine, 9400)
    assert _reaches(full, engine, OUTSIDE, 443)
    assert not _reaches(full, engine, OUTSIDE, 80)


@pytest.mark.parametrize("shape", ["default", "minimal"])
def test_without_policies_there_is_none(tools: Tools, shape: str) -> None:
    rendered = tools.template(shape, {"networkPolicy.enabled": False})
    assert "NetworkPolicy" not in rendered.kinds()
