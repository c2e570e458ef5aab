"""The values for kind and minikube: what their pods say is run, and `helm test` asks it."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.charts.rendering import HelmError, container, environment
from tests.cluster.control_plane import ControlPlane, eventually
from tests.cluster.old_api import translated
from tests.cluster.processes import addresses, get, running
from tests.cluster.releases import Releases

NAMESPACE = "small"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
TEST = f"{PODS}/chat-longleaf-test-chat"
ENGINE, GATEWAY, PROBE = "10.77.0.41", "10.77.0.42", "10.77.0.43"


@pytest.fixture(scope="module")
def placed(
    plane: ControlPlane, releases: Releases, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The release's two containers run, with the arguments of their pods."""
    plane.add_node("any", {})
    releases.apply("install", NAMESPACE, "minimal")
    token = tmp_path_factory.mktemp("small") / "token"
    token.write_text(releases.token(NAMESPACE, "chat-longleaf-gateway"))
    with ExitStack() as stack:
        stack.callback(plane.ask, "DELETE", "/api/v1/nodes/any")
        stack.callback(releases.helm, "uninstall", "chat", "-n", NAMESPACE)
        pods = eventually(
            lambda: (
                found
                if len(found := plane.items(PODS)) == 2
                and all(one["spec"].get("nodeName") for one in found.values())
                else None
            ),
            "both pods are placed",
        )
        stack.enter_context(addresses(ENGINE, GATEWAY))
        api = stack.enter_context(translated(plane.port))
        for name, pod in pods.items():
            part = pod["metadata"]["labels"]["app.kubernetes.io/component"]
            one = container(pod["spec"], part)
            assert one["command"] == ["longleaf"]
            # In a cluster, the API server is found by the pod's own environment.
            more = ["--kubernetes-api", api] if part == "gateway" else []
            stack.enter_context(
                running(*(*one["args"], *more), LONGLEAF_GATEWAY_KUBERNETES_TOKEN_FILE=str(token))
            )
            plane.run_pod(NAMESPACE, name, GATEWAY if part == "gateway" else ENGINE)
        eventually(lambda: get(f"http://{GATEWAY}:8080/readyz"), "the gateway is ready")
        assert get(f"http://{ENGINE}:30000/health") is not None
        yield


def _behind(plane: ControlPlane, url: str) -> str:
    """Where a Service's URL leads, as kube-proxy would have it."""
    service, _, namespace = str(urlsplit(url).hostname).partition(".")
    assert namespace == NAMESPACE
    (port,) = plane.ask("GET", f"/api/v1/namespaces/{namespace}/services/{service}")["spec"][
        "ports"
    ]
    assert port["port"] == urlsplit(url).port
    (subset,) = plane.ask("GET", f"/api/v1/namespaces/{namespace}/endpoints/{service}")["subsets"]
    (address,), (target,) = subset["addresses"], subset["ports"]
    assert target["name"] == port["name"]
    return f"http://{address['ip']}:{target['port']}"


def _run(plane: ControlPlane, spec: Any) -> int:
    """Run the test's container, and write its end as a kubelet would."""
    one = container(spec, "chat")
    variables = environment(one)
    variables["URL"] = _behind(plane, variables["URL"])
    done = subprocess.run(
        [sys.executable, *one["command"][1:], *one["args"]],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    phase = "Failed" if done.returncode else "Succeeded"
    kind = "application/strategic-merge-patch+json"
    plane.ask("PATCH", f"{TEST}/status", {"status": {"phase": phase}}, kind=kind)
    assert done.returncode or "1, 2, 3" in done.stdout
    return done.returncode


@pytest.mark.parametrize("major", ["3", "4"])
def test_helm_test_passes_where_the_gateway_answers(
    plane: ControlPlane, releases: Releases, placed: None, major: str
) -> None:
    said: list[str] = []
    arguments = ("test", "chat", "-n", NAMESPACE, "--timeout", "120s")
    test = threading.Thread(target=lambda: said.append(releases.helm(*arguments, major=major)))
    test.start()
    pod = eventually(lambda: plane.find(TEST), "the test's pod is made")
    assert _run(plane, pod["spec"]) == 0
    test.join(timeout=60)
    assert "Succeeded" in said[0]
    eventually(lambda: plane.find(TEST) is None, "the pod is taken away")


def _resolved(plane: ControlPlane, url: str) -> str:
    """A URL of a pod's own name, as the cluster's DNS makes it of its Service's endpoints."""
    parts = urlsplit(url)
    pod, service, namespace = str(parts.hostname).split(".")
    found = plane.ask("GET", f"/api/v1/namespaces/{namespace}/endpoints/{service}")["subsets"]
    (address,) = (
        one["ip"] for each in found for one in each["addresses"] if one.get("hostname") == pod
    )
    return url.replace(str(parts.hostname), address)


def test_a_probe_watches_its_engine_which_is_not_started_anew(
    plane: ControlPlane, releases: Releases, placed: None
) -> None:
    engine = f"{PODS}/chat-longleaf-engine-0"
    before = plane.ask("GET", engine)["metadata"]["uid"]
    few = {"enabled": True, "contexts": [160], "repeats": 1, "port": 19401}
    said = releases.apply("upgrade", NAMESPACE, "minimal", probe=few)
    assert "logs chat-longleaf-probe-0" in said
    pod = eventually(lambda: plane.find(f"{PODS}/chat-longleaf-probe-0"), "the probe's pod is made")
    one = container(pod["spec"], "probe")
    words = [word.replace("$(ENGINE)", "0") for word in one["args"]]
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in ("--url", "--metrics-url"):
            words[number] = f"{name}={_resolved(plane, value)}"
    metrics = f"http://{PROBE}:19401/metrics"
    passed = 'longleaf_probe_passed{probe="commit",verdict="text"} 1.0'
    with addresses(PROBE), running(*words):
        eventually(lambda: passed in (get(metrics) or ""), "the probe passed")
    assert plane.ask("GET", engine)["metadata"]["uid"] == before


def test_helm_test_fails_where_the_model_is_another(
    plane: ControlPlane, releases: Releases, placed: None
) -> None:
    releases.apply("upgrade", NAMESPACE, "minimal", engine__servedModelName="other")
    failures: list[str] = []

    def ask() -> None:
        try:
            releases.helm("test", "chat", "-n", NAMESPACE, "--timeout", "120s")
        except HelmError as error:
            failures.append(str(error))

    test = threading.Thread(target=ask)
    test.start()
    pod = eventually(lambda: plane.find(TEST), "the test's pod is made")
    assert _run(plane, pod["spec"]) != 0
    test.join(timeout=60)
    assert "failed" in failures[0].lower()
