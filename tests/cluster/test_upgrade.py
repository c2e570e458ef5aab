"""An upgrade under load: old and new pods side by side, and no stream ends early."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from longleaf.cluster.drain import replica_states
from tests.cluster.control_plane import ControlPlane, eventually
from tests.cluster.old_api import translated
from tests.cluster.processes import Stream, addresses, chat, get, running
from tests.cluster.releases import Releases

NAMESPACE = "renewed"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SLICES = f"/apis/discovery.k8s.io/v1beta1/namespaces/{NAMESPACE}/endpointslices"
ENGINE, SECOND = "chat-longleaf-engine-0", "chat-longleaf-engine-1"
ENGINE_ADDRESS, OLD, NEW, SECOND_ADDRESS = "10.77.0.31", "10.77.0.32", "10.77.0.33", "10.77.0.34"
TOKENS = 2500


@pytest.fixture(scope="module")
def placed(plane: ControlPlane, releases: Releases) -> Iterator[None]:
    plane.add_node("any", {})
    releases.apply("install", NAMESPACE, "minimal")
    eventually(
        lambda: (
            len(found := plane.items(PODS)) == 2
            and all(one["spec"].get("nodeName") for one in found.values())
        ),
        "both pods are placed",
    )
    yield
    releases.helm("uninstall", "chat", "-n", NAMESPACE)
    plane.remove_all(PODS)
    plane.remove("/api/v1/nodes/any")


def _gateways(plane: ControlPlane) -> set[str]:
    return {name for name in plane.items(PODS) if "-gateway-" in name}


def _served(plane: ControlPlane) -> set[str]:
    """Addresses that the gateway's Service sends to: ready, and not about to end."""
    return {
        address
        for one in plane.items(SLICES).values()
        if one["metadata"]["labels"]["kubernetes.io/service-name"] == "chat-longleaf-gateway"
        for endpoint in one.get("endpoints") or ()
        if endpoint["conditions"].get("ready")
        for address in endpoint["addresses"]
    }


class Asking(threading.Thread):
    """Asks whatever the Service sends to, again and again."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(daemon=True)
        self._plane = plane
        self._end = threading.Event()
        self.answers: dict[str, int] = {}
        self.failures: list[str] = []
        self.start()

    def run(self) -> None:
        """Ask until told to end."""
        while not self._end.is_set():
            served = _served(self._plane)
            if not served:
                self.failures.append("no gateway is served")
            for address in served:
                try:
                    assert "1, 2, 3" in chat(f"http://{address}:8080")
                except (OSError, AssertionError) as error:
                    self.failures.append(f"{address}: {error!r}")
                self.answers[address] = self.answers.get(address, 0) + 1
            self._end.wait(0.1)

    def end(self) -> None:
        """Ask no more."""
        self._end.set()
        self.join(timeout=60)


def test_an_upgrade_keeps_streams_and_refuses_nobody(
    plane: ControlPlane, releases: Releases, placed: None, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(releases.token(NAMESPACE, "chat-longleaf-gateway"))
    with ExitStack() as stack:
        stack.enter_context(addresses(ENGINE_ADDRESS, OLD, NEW))
        api = stack.enter_context(translated(plane.port))
        command = ("embedded", "--host", ENGINE_ADDRESS, "--served-model-name", "longleaf-tiny")
        stack.enter_context(running(*command, "--speculative-algorithm", "none"))
        plane.run_pod(NAMESPACE, ENGINE, ENGINE_ADDRESS)
        gateway = (
            *("gateway", "--kubernetes-service", f"{NAMESPACE}/chat-longleaf-engine"),
            *("--kubernetes-port", "http", "--kubernetes-api", api),
        )

        def start(address: str) -> subprocess.Popen[bytes]:
            words = (*gateway, "--host", address, "--metrics-host", address)
            return stack.enter_context(
                running(*words, LONGLEAF_GATEWAY_KUBERNETES_TOKEN_FILE=str(token))
            )

        (old,) = _gateways(plane)
        process = start(OLD)
        eventually(lambda: get(f"http://{OLD}:8080/readyz"), "the old gateway is ready")
        plane.run_pod(NAMESPACE, old, OLD)
        eventually(lambda: _served(plane) == {OLD}, "the Service sends to it")
        stream = Stream(f"http://{OLD}:8080", TOKENS)
        assert stream.started.wait(60)
        asking = Asking(plane)

        releases.apply("upgrade", NAMESPACE, "minimal", gateway__queueSize=99)
        (new,) = eventually(lambda: _gateways(plane) - {old}, "a new gateway is made")
        start(NEW)
        eventually(lambda: get(f"http://{NEW}:8080/readyz"), "the new gateway is ready")
        assert "deletionTimestamp" not in plane.ask("GET", f"{PODS}/{old}")["metadata"]
        plane.run_pod(NAMESPACE, new, NEW)
        eventually(
            lambda: plane.ask("GET", f"{PODS}/{old}")["metadata"].get("deletionTimestamp"),
            "the old gateway is to end",
        )
        # preStop: the Service lets go first.
        eventually(lambda: _served(plane) == {NEW}, "the Service sends to the new one alone")
        asked = asking.answers.get(NEW, 0)
        eventually(lambda: asking.answers.get(NEW, 0) > asked, "clients follow")
        assert not stream.ended.is_set()
        process.send_signal(signal.SIGTERM)
        assert stream.ended.wait(200)
        assert stream.tokens() == TOKENS
        assert process.wait(timeout=30) == 0
        asking.end()
        assert asking.failures == []
        assert set(asking.answers) == {OLD, NEW}
        ending = plane.ask("GET", f"{PODS}/{old}")["metadata"]
        assert ending["deletionGracePeriodSeconds"] == 10 + 120 + 30


def _states(address: str) -> set[str]:
    """States in which the gateway holds the engine at an address."""
    states = replica_states(get(f"http://{OLD}:9080/metrics") or "")
    return {state for url, state in states.items() if url == f"http://{address}:30000"}


def test_engines_are_renewed_one_by_one_and_keep_their_streams(
    plane: ControlPlane, releases: Releases, placed: None, tmp_path: Path
) -> None:
    """By their deletion alone, which takes them off their Service before preStop is over."""
    releases.apply("upgrade", NAMESPACE, "minimal", engine__replicas=2)
    eventually(
        lambda: (plane.find(f"{PODS}/{SECOND}") or {"spec": {}})["spec"].get("nodeName"),
        "the second engine is placed",
    )
    token = tmp_path / "token"
    token.write_text(releases.token(NAMESPACE, "chat-longleaf-gateway"))
    with ExitStack() as stack:
        stack.enter_context(addresses(ENGINE_ADDRESS, SECOND_ADDRESS, OLD))
        api = stack.enter_context(translated(plane.port))
        common = ("--served-model-name", "longleaf-tiny", "--speculative-algorithm", "none")
        stack.enter_context(running("embedded", "--host", ENGINE_ADDRESS, *common))
        second = stack.enter_context(running("embedded", "--host", SECOND_ADDRESS, *common))
        plane.run_pod(NAMESPACE, ENGINE, ENGINE_ADDRESS)
        plane.run_pod(NAMESPACE, SECOND, SECOND_ADDRESS)
        stack.enter_context(
            running(
                *("gateway", "--kubernetes-service", f"{NAMESPACE}/chat-longleaf-engine"),
                *("--kubernetes-port", "http", "--kubernetes-api", api),
                *("--host", OLD, "--metrics-host", OLD),
                LONGLEAF_GATEWAY_KUBERNETES_TOKEN_FILE=str(token),
            )
        )
        both = (ENGINE_ADDRESS, SECOND_ADDRESS)
        eventually(lambda: all(_states(one) == {"ready"} for one in both), "both are ready")
        url = f"http://{OLD}:8080"
        streams = [Stream(url, TOKENS) for _ in both]
        for stream in streams:
            assert stream.started.wait(60)

        releases.apply(
            *("upgrade", NAMESPACE, "minimal"), engine__replicas=2, engine__maxRunningRequests=4
        )
        old = plane.ask("GET", f"{PODS}/{SECOND}")["metadata"]["uid"]
        eventually(
            lambda: plane.ask("GET", f"{PODS}/{SECOND}")["metadata"].get("deletionTimestamp"),
            "the second engine is to end",
        )
        eventually(lambda: _states(SECOND_ADDRESS) == {"draining"}, "the gateway lets go of it")
        assert "deletionTimestamp" not in plane.ask("GET", f"{PODS}/{ENGINE}")["metadata"]
        assert not any(stream.ended.is_set() for stream in streams)
        second.send_signal(signal.SIGTERM)
        assert "1, 2, 3" in chat(url)
        for stream in streams:
            assert stream.ended.wait(200)
            assert stream.tokens() == TOKENS
        assert second.wait(timeout=30) == 0

        plane.remove(f"{PODS}/{SECOND}")
        eventually(
            lambda: (
                (plane.find(f"{PODS}/{SECOND}") or {"metadata": {"uid": old}})["metadata"]["uid"]
                != old
            ),
            "its successor is made",
        )
        assert "deletionTimestamp" not in plane.ask("GET", f"{PODS}/{ENGINE}")["metadata"]
        stack.enter_context(running("embedded", "--host", SECOND_ADDRESS, *common))
        plane.run_pod(NAMESPACE, SECOND, SECOND_ADDRESS)
        eventually(lambda: _states(SECOND_ADDRESS) == {"ready"}, "the successor is ready")
        eventually(
            lambda: plane.ask("GET", f"{PODS}/{ENGINE}")["metadata"].get("deletionTimestamp"),
            "the first engine is next",
        )
