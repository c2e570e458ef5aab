"""The gateway's own account, and the gateway following engines through the API server."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.control_plane import ApiError, ControlPlane, eventually, free_port
from tests.cluster.old_api import translated
from tests.cluster.processes import addresses, chat, get, running
from tests.cluster.releases import Releases

NAMESPACE = "following"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SLICES = "/apis/discovery.k8s.io/v1beta1/namespaces/{}/endpointslices"
ADDRESSES = ("10.77.0.11", "10.77.0.12")


@pytest.fixture(scope="module")
def release(plane: ControlPlane, releases: Releases) -> Iterator[None]:
    plane.add_node("any", {})
    releases.apply("install", NAMESPACE, "minimal", engine__replicas=2)
    eventually(lambda: len(plane.items(PODS)) == 3, "the pods are made")
    yield
    releases.helm("uninstall", "chat", "-n", NAMESPACE)
    plane.remove("/api/v1/nodes/any")


@pytest.fixture(scope="module")
def token(releases: Releases, release: None) -> str:
    return releases.token(NAMESPACE, "chat-longleaf-gateway")


def _status(plane: ControlPlane, token: str, method: str, path: str, body: Any = None) -> int:
    try:
        plane.ask(method, path, body, token=token)
    except ApiError as error:
        return error.status
    return 200


def test_the_gateways_token_watches_its_endpointslices_and_nothing_else(
    plane: ControlPlane, token: str
) -> None:
    own = SLICES.format(NAMESPACE)
    assert _status(plane, token, "GET", own) == 200
    assert _status(plane, token, "GET", f"{own}?watch=true&timeoutSeconds=1") == 200
    one = f"{own}/{next(iter(plane.items(own)))}"
    assert plane.find(one)
    forbidden = [
        ("GET", one),
        ("DELETE", one),
        ("POST", own),
        ("GET", SLICES.format("default")),
        ("GET", "/apis/discovery.k8s.io/v1beta1/endpointslices"),
        *(
            ("GET", f"/api/v1/namespaces/{NAMESPACE}/{kind}")
            for kind in ("pods", "secrets", "configmaps", "services", "endpoints", "events")
        ),
        ("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"),
        ("GET", "/api/v1/nodes"),
        ("GET", "/api/v1/namespaces"),
    ]
    found = {
        f"{method} {path}": _status(plane, token, method, path, {} if method == "POST" else None)
        for method, path in forbidden
    }
    assert found == dict.fromkeys(found, 403)


def _rules(plane: ControlPlane, token: str) -> set[tuple[str, str]]:
    """Verb and resource of all that an account may do in its namespace, by its own word."""
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": NAMESPACE},
    }
    rules = plane.ask("POST", path, body, token=token)["status"]["resourceRules"]
    return {
        (verb, f"{group}/{resource}")
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        # What every account may ask about itself.
        if group != "authorization.k8s.io"
    }


def test_the_accounts_may_do_no_more_than_that(
    plane: ControlPlane, releases: Releases, token: str
) -> None:
    resource = "discovery.k8s.io/endpointslices"
    assert _rules(plane, token) == {("list", resource), ("watch", resource)}
    assert _rules(plane, releases.token(NAMESPACE, "chat-longleaf-engine")) == set()


def test_the_engines_account_may_do_nothing(
    plane: ControlPlane, releases: Releases, release: None
) -> None:
    token = releases.token(NAMESPACE, "chat-longleaf-engine")
    assert _status(plane, token, "GET", SLICES.format(NAMESPACE)) == 403
    assert _status(plane, token, "GET", PODS) == 403


def _ready(metrics: str) -> set[str]:
    """Addresses of the replicas that the gateway holds for ready."""
    lines = (get(metrics) or "").splitlines()
    held = [line for line in lines if line.startswith("longleaf_gateway_replica_ready{")]
    return {
        address for address in ADDRESSES for line in held if address in line and line[-3:] == "1.0"
    }


def test_the_gateway_follows_engines_that_come_and_go(
    plane: ControlPlane, token: str, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(token)
    with ExitStack() as stack:
        stack.enter_context(addresses(*ADDRESSES))
        for address in ADDRESSES:
            stack.enter_context(
                running("embedded", "--host", address, "--served-model-name", "longleaf-tiny")
            )
        api = stack.enter_context(translated(plane.port))
        ports = free_port(), free_port()
        stack.enter_context(
            running(
                *("gateway", "--kubernetes-service", f"{NAMESPACE}/chat-longleaf-engine"),
                *("--kubernetes-port", "http", "--kubernetes-api", api),
                *("--port", str(ports[0]), "--metrics-port", str(ports[1])),
                LONGLEAF_GATEWAY_KUBERNETES_TOKEN_FILE=str(token_file),
            )
        )
        url, metrics = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}/metrics"
        eventually(lambda: get(metrics), "the gateway listens")
        assert _ready(metrics) == set()

        plane.run_pod(NAMESPACE, "chat-longleaf-engine-0", ADDRESSES[0])
        eventually(lambda: _ready(metrics) == {ADDRESSES[0]}, "the first engine is found")
        assert get(f"{url}/readyz")
        assert "1, 2, 3" in chat(url)

        plane.run_pod(NAMESPACE, "chat-longleaf-engine-1", ADDRESSES[1])
        eventually(lambda: _ready(metrics) == set(ADDRESSES), "the second engine is found")

        plane.stop_api_server()
        eventually(
            lambda: "longleaf_gateway_discovery_up 0.0" in (get(metrics) or ""),
            "the gateway notices",
        )
        assert _ready(metrics) == set(ADDRESSES)
        assert "1, 2, 3" in chat(url)

        plane.start_api_server()
        plane.remove(f"{PODS}/chat-longleaf-engine-0")
        eventually(lambda: _ready(metrics) == {ADDRESSES[1]}, "the first engine is let go")
        assert "longleaf_gateway_discovery_up 1.0" in str(get(metrics))
        assert "1, 2, 3" in chat(url)
