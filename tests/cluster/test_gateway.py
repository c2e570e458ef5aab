"""The gateway's own account, and the gateway following engines through the API server."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from json import dumps, loads
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.control_plane import ApiError, ControlPlane, eventually, free_port
from tests.cluster.old_api import translated
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
    plane.ask("DELETE", "/api/v1/nodes/any")


@pytest.fixture(scope="module")
def token(plane: ControlPlane, release: None) -> str:
    """What the gateway's pods are handed."""
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/chat-longleaf-gateway/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    answer = plane.ask("POST", path, body)
    return str(answer["status"]["token"])


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


def test_the_engines_account_may_do_nothing(plane: ControlPlane, release: None) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/chat-longleaf-engine/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = plane.ask("POST", path, body)["status"]["token"]
    assert _status(plane, token, "GET", SLICES.format(NAMESPACE)) == 403
    assert _status(plane, token, "GET", PODS) == 403


@contextmanager
def _process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "longleaf", *arguments], env={**os.environ, **environment}
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except (OSError, urllib.error.URLError):
        return None


def _ready(metrics: str) -> set[str]:
    """Addresses of the replicas that the gateway holds for ready."""
    lines = (_get(metrics) or "").splitlines()
    held = [line for line in lines if line.startswith("longleaf_gateway_replica_ready{")]
    return {
        address for address in ADDRESSES for line in held if address in line and line[-3:] == "1.0"
    }


def _chat(url: str) -> str:
    body = {
        "model": "longleaf-tiny",
        "messages": [{"role": "user", "content": "Count from 1 to 5."}],
        "max_tokens": 16,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(loads(answer.read())["choices"][0]["message"]["content"])


def test_the_gateway_follows_engines_that_come_and_go(
    plane: ControlPlane, token: str, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(token)
    for address in ADDRESSES:
        subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
    with ExitStack() as stack:
        for address in ADDRESSES:
            stack.enter_context(
                _process("embedded", "--host", address, "--served-model-name", "longleaf-tiny")
            )
        api = stack.enter_context(translated(plane.port))
        ports = free_port(), free_port()
        stack.enter_context(
            _process(
                *("gateway", "--kubernetes-service", f"{NAMESPACE}/chat-longleaf-engine"),
                *("--kubernetes-port", "http", "--kubernetes-api", api),
                *("--port", str(ports[0]), "--metrics-port", str(ports[1])),
                LONGLEAF_GATEWAY_KUBERNETES_TOKEN_FILE=str(token_file),
            )
        )
        url, metrics = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}/metrics"
        eventually(lambda: _get(metrics), "the gateway listens")
        assert _ready(metrics) == set()

        plane.run_pod(NAMESPACE, "chat-longleaf-engine-0", ADDRESSES[0])
        eventually(lambda: _ready(metrics) == {ADDRESSES[0]}, "the first engine is found")
        assert _get(f"{url}/readyz")
        assert "1, 2, 3" in _chat(url)

        plane.run_pod(NAMESPACE, "chat-longleaf-engine-1", ADDRESSES[1])
        eventually(lambda: _ready(metrics) == set(ADDRESSES), "the second engine is found")

        plane.stop_api_server()
        eventually(
            lambda: "longleaf_gateway_discovery_up 0.0" in (_get(metrics) or ""),
            "the gateway notices",
        )
        assert _ready(metrics) == set(ADDRESSES)
        assert "1, 2, 3" in _chat(url)

        plane.start_api_server()
        plane.ask("DELETE", f"{PODS}/chat-longleaf-engine-0?gracePeriodSeconds=0")
        eventually(lambda: _ready(metrics) == {ADDRESSES[1]}, "the first engine is let go")
        assert "longleaf_gateway_discovery_up 1.0" in str(_get(metrics))
        assert "1, 2, 3" in _chat(url)
