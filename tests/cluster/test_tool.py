"""``longleaf cluster`` against the control plane, with engines and a gateway that run."""

import json
import os
import signal
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, run
from typing import Any

import pytest
from click.testing import CliRunner, Result

from longleaf.cluster.client import Cluster, ClusterError
from longleaf.cluster.command import cluster_command
from longleaf.cluster.drain import Drain, DrainConfig, DrainError
from longleaf.cluster.undo import Step, Undo
from tests.charts.rendering import Rendered
from tests.cluster.control_plane import ControlPlane, eventually
from tests.cluster.old_api import translated
from tests.cluster.processes import Stream, addresses, chat, get, kubelet, running
from tests.cluster.releases import Releases

NAMESPACE = "tended"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
BUDGETS = f"/apis/policy/v1beta1/namespaces/{NAMESPACE}/poddisruptionbudgets"
SECRET = "a-value-that-must-not-leave"
PROMPT = "Count from 1 to 9, which nobody else shall read."
ENGINES = {"chat-longleaf-engine-0": "10.77.0.21", "chat-longleaf-engine-1": "10.77.0.22"}
GATEWAY = "10.77.0.23"
URL, METRICS = f"http://{GATEWAY}:8080", f"http://{GATEWAY}:9080/metrics"
KUBELET = "10.77.0.24"
APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "engine"}},
            }
        ]
    }
}


@dataclass
class Release:
    """The release, and what runs at its pods' addresses."""

    plane: ControlPlane
    api: str
    kubeconfig: Path
    gateway: str
    log: Path
    engines: dict[str, Popen[bytes]] = field(default_factory=dict)

    def call(self, *arguments: str) -> Result:
        """Run ``longleaf cluster``."""
        options = ("-n", NAMESPACE, "--release", "chat", "--kubeconfig", str(self.kubeconfig))
        return CliRunner().invoke(cluster_command, [*options, *arguments])

    def node_of(self, pod: str) -> str:
        """Node of a pod."""
        return str(self.plane.ask("GET", f"{PODS}/{pod}")["spec"]["nodeName"])

    def logged(self) -> list[dict[str, Any]]:
        """What the gateway logged."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def answered(self) -> list[tuple[str, int]]:
        """Replica and tokens of each answer that the gateway logged."""
        found = [one for one in self.logged() if one.get("route") == "chat_completions"]
        return [(one["replica"], one["completion_tokens"]) for one in found]

    def states(self, address: str) -> set[str]:
        """States in which the gateway holds the engine at an address."""
        lines = (get(METRICS) or "").splitlines()
        prefix = f'longleaf_gateway_replica_state{{replica="http://{address}:30000",state="'
        return {
            line.removeprefix(prefix).partition('"')[0]
            for line in lines
            if line.startswith(prefix) and line.endswith(" 1.0")
        }


@pytest.fixture(scope="module")
def release(
    plane: ControlPlane, releases: Releases, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Release]:
    folder = tmp_path_factory.mktemp("tended")
    log = folder / "gateway.log"
    logs: dict[str, Path] = {}
    with ExitStack() as stack:
        stack.enter_context(addresses(*ENGINES.values(), GATEWAY, KUBELET))
        port = stack.enter_context(kubelet(KUBELET, logs))
        for number in (1, 2, 3):
            labels = {"nvidia.com/gpu.product": "any-gpu"}
            plane.add_node(f"tended-{number}", labels, gpus=8, kubelet=(KUBELET, port))
        releases.apply(
            *("install", NAMESPACE, "minimal"),
            engine__replicas=2,
            engine__extraEnv=[{"name": "PRIVATE", "value": SECRET}],
            engine__affinity=APART,
            gateway__extraArgs=["--upstream-api-key", SECRET],
            gateway__podAnnotations={"note": SECRET},
        )
        stack.callback(_remove, plane, releases)
        eventually(
            lambda: (
                len(found := plane.items(PODS)) == 3
                and all(one["spec"].get("nodeName") for one in found.values())
            ),
            "three pods are placed",
        )
        (gateway,) = set(plane.items(PODS)) - set(ENGINES)
        logs[f"{gateway}/gateway"] = log
        api = stack.enter_context(translated(plane.port))
        plane.write_kubeconfig(folder / "kubeconfig", api)
        token = folder / "token"
        token.write_text(releases.token(NAMESPACE, "chat-longleaf-gateway"))
        found = Release(plane, api, folder / "kubeconfig", gateway, log)
        for name, address in ENGINES.items():
            command = ("embedded", "--host", address, "--served-model-name", "longleaf-tiny")
            found.engines[name] = stack.enter_context(
                running(*command, "--speculative-algorithm", "none")
            )
            plane.run_pod(NAMESPACE, name, address)
        stack.enter_context(
            running(
                *("gateway", "--kubernetes-service", f"{NAMESPACE}/chat-longleaf-engine"),
                *("--kubernetes-port", "http", "--kubernetes-api", api, "--host", GATEWAY),
                *("--metrics-host", GATEWAY, "--log-level", "debug"),
                log=log,
                LONGLEAF_GATEWAY_KUBERNETES_TOKEN_FILE=str(token),
                LONGLEAF_GATEWAY_UPSTREAM_API_KEY=SECRET,
            )
        )
        plane.run_pod(NAMESPACE, gateway, GATEWAY)
        eventually(
            lambda: all(found.states(address) == {"ready"} for address in ENGINES.values()),
            "the gateway holds both engines for ready",
        )
        yield found


def _remove(plane: ControlPlane, releases: Releases) -> None:
    releases.helm("uninstall", "chat", "-n", NAMESPACE)
    plane.remove_all(PODS)
    for number in (1, 2, 3):
        plane.remove(f"/api/v1/nodes/tended-{number}")


def test_status_is_one_table_of_replicas_and_nodes(release: Release) -> None:
    done = release.call("status")
    assert done.exit_code == 0, done.output
    header, *lines = [line.split() for line in done.stdout.splitlines()]
    assert header == ["POD", "PART", "STATE", "READY", "RESTARTS", "NODE", "GPUS", "PRODUCT"]
    nodes = {name: release.node_of(name) for name in (*ENGINES, release.gateway)}
    expected = [
        [name, "gateway" if name == release.gateway else "engine", "Running", "yes", "0"]
        for name in nodes
    ]
    assert [line[:5] for line in lines[:3]] == expected
    assert [line[5:] for line in lines[:3]] == [[node, "8", "any-gpu"] for node in nodes.values()]
    (free,) = {"tended-1", "tended-2", "tended-3"} - {nodes[name] for name in ENGINES}
    assert lines[3:] == [["-", "node", "No", "engine", "-", "-", free, "8", "any-gpu"]]


def test_a_bundle_holds_no_secret_and_no_prompt(release: Release, tmp_path: Path) -> None:
    assert chat(URL, messages=[{"role": "user", "content": PROMPT}])
    eventually(release.answered, "the gateway logs the request")
    path = tmp_path / "bundle.tar.gz"
    done = release.call("bundle", str(path))
    assert done.exit_code == 0, done.output
    with tarfile.open(path) as archive:
        texts = {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }
    for name in ("pods", "statefulsets", "deployments", "services", "events", "nodes"):
        assert json.loads(texts[f"{name}.json"]), name
    assert json.loads(texts["version.json"])["gitVersion"] == "v1.20.2"
    assert {one["metadata"]["name"] for one in json.loads(texts["pods.json"])} == {
        *ENGINES,
        release.gateway,
    }
    assert "10.77.0.21" in texts["endpointslices.json"]
    assert "PRIVATE" in texts["statefulsets.json"]
    assert "--upstream-api-key" in texts["deployments.json"]
    log = texts[f"logs/{release.gateway}-gateway.txt"]
    assert [json.loads(one) for one in log.splitlines()] == release.logged()
    assert 'state="ready"} 1.0' in texts[f"metrics/{release.gateway}.txt"]
    together = "".join(texts.values())
    assert SECRET not in together
    assert "nobody else" not in together


def test_a_bundle_is_its_owners_alone(release: Release, tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    path.write_text("an older one")
    path.chmod(0o644)
    assert release.call("bundle", str(path)).exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    done = release.call("bundle", str(tmp_path / "no" / "bundle.tar.gz"))
    assert done.exit_code == 1
    assert "cannot be written" in done.stderr


@pytest.mark.parametrize("command", ["status", "bundle"])
def test_an_unknown_release_is_told(release: Release, tmp_path: Path, command: str) -> None:
    options = ("-n", NAMESPACE, "--release", "chta", "--kubeconfig", str(release.kubeconfig))
    paths = [str(tmp_path / "bundle.tar.gz")] if command == "bundle" else []
    done = CliRunner().invoke(cluster_command, [*options, command, *paths])
    assert done.exit_code == 1
    assert f"there is no release 'chta' in namespace '{NAMESPACE}'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_status_without_the_right_to_see_nodes_has_the_replicas(
    release: Release, tmp_path: Path
) -> None:
    plane = release.plane
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
    body = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "viewer"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "view",
        },
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}],
    }
    plane.ask("POST", f"{roles}/rolebindings", body)
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = str(plane.ask("POST", path, request)["status"]["token"])
    plane.write_kubeconfig(tmp_path / "viewer", release.api, token)
    options = ("-n", NAMESPACE, "--release", "chat", "--kubeconfig", str(tmp_path / "viewer"))
    done = CliRunner().invoke(cluster_command, [*options, "status"])
    assert done.exit_code == 0, done.output
    assert "nodes are not to be had" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == [*ENGINES, release.gateway]


def test_drain_knows_the_engines(release: Release) -> None:
    done = release.call("drain", "chat-longleaf-engine-9")
    assert done.exit_code == 1
    assert "chat-longleaf-engine-0, chat-longleaf-engine-1" in done.stderr
    done = release.call("drain", release.gateway)
    assert done.exit_code == 1
    assert "no engine" in done.stderr


@pytest.fixture
def budget(release: Release, releases: Releases) -> Iterator[dict[str, Any]]:
    """The chart's own budget of the engines, at the version that 1.20 knows."""
    rendered: Rendered = releases.tools.template("minimal")
    body = rendered.of("PodDisruptionBudget", "chat-longleaf-engine")
    body["apiVersion"] = "policy/v1beta1"
    body["metadata"]["namespace"] = NAMESPACE
    release.plane.ask("POST", BUDGETS, body)
    yield body
    release.plane.remove(f"{BUDGETS}/chat-longleaf-engine")


def _allowed(release: Release) -> int | None:
    found = release.plane.ask("GET", f"{BUDGETS}/chat-longleaf-engine").get("status", {})
    allowed: int | None = found.get("disruptionsAllowed") if "currentHealthy" in found else None
    return allowed


def _unready(release: Release, name: str) -> None:
    body = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    kind = "application/strategic-merge-patch+json"
    release.plane.ask("PATCH", f"{PODS}/{name}/status", body, kind=kind)


def test_the_only_ready_engine_stays(release: Release) -> None:
    _unready(release, "chat-longleaf-engine-1")
    try:
        done = release.call("drain", "chat-longleaf-engine-0")
        assert done.exit_code == 1
        assert "no other engine is ready and serves" in done.stderr
    finally:
        release.plane.run_pod(
            NAMESPACE, "chat-longleaf-engine-1", ENGINES["chat-longleaf-engine-1"]
        )
    node = release.plane.ask("GET", f"/api/v1/nodes/{release.node_of('chat-longleaf-engine-0')}")
    assert "unschedulable" not in node["spec"]


def _serving(release: Release, name: str, value: str) -> None:
    body = {"metadata": {"labels": {"longleaf.dev/serving": value}}}
    release.plane.ask("PATCH", f"{PODS}/{name}", body, kind="application/merge-patch+json")


def _as_it_was(release: Release, name: str) -> None:
    pod = release.plane.ask("GET", f"{PODS}/{name}")
    assert pod["metadata"]["labels"]["longleaf.dev/serving"] == "true"
    assert "deletionTimestamp" not in pod["metadata"]
    node = release.plane.ask("GET", f"/api/v1/nodes/{release.node_of(name)}")
    assert not node["spec"].get("unschedulable")
    address = ENGINES[name]
    eventually(lambda: release.states(address) == {"ready"}, "the gateway sends to it")


def test_an_engine_that_is_out_of_its_service_is_no_other_engine(release: Release) -> None:
    _serving(release, "chat-longleaf-engine-1", "false")
    try:
        done = release.call("drain", "chat-longleaf-engine-0")
    finally:
        _serving(release, "chat-longleaf-engine-1", "true")
    assert done.exit_code == 1
    assert "no other engine is ready and serves" in done.stderr
    assert done.stdout == ""
    _as_it_was(release, "chat-longleaf-engine-0")


def test_of_two_drains_at_once_neither_takes_the_last_engine(release: Release) -> None:
    """The other one leaves after this one has looked, and before it has changed anything."""
    first, second = ENGINES

    class Raced(Cluster):
        def evict(self, pod: str, uid: str, *, dry_run: bool = False) -> None:
            super().evict(pod, uid, dry_run=dry_run)
            assert dry_run
            _serving(release, second, "false")

    cluster = Raced.connected(release.kubeconfig, None, NAMESPACE, "chat")
    try:
        with pytest.raises(DrainError, match="no other engine is ready and serves"):
            Drain(cluster, DrainConfig(seconds=30)).run(first)
    finally:
        cluster.close()
        _serving(release, second, "true")
    _as_it_was(release, first)


def test_a_drain_that_the_budget_refuses_changes_nothing(
    release: Release, budget: dict[str, Any]
) -> None:
    _unready(release, "chat-longleaf-engine-1")
    name = "chat-longleaf-engine-0"
    try:
        eventually(lambda: _allowed(release) == 0, "the budget allows nothing")
        done = release.call("drain", name, "--only", "--timeout", "8")
    finally:
        release.plane.run_pod(
            NAMESPACE, "chat-longleaf-engine-1", ENGINES["chat-longleaf-engine-1"]
        )
    assert done.exit_code == 1
    assert "disruption budget" in done.stderr
    assert "cordoned" not in done.stdout
    assert "leaves" not in done.stdout
    _as_it_was(release, name)


@contextmanager
def _draining(release: Release, name: str) -> Iterator[Popen[str]]:
    """A drain as a process of its own."""
    options = ("-n", NAMESPACE, "--release", "chat", "--kubeconfig", str(release.kubeconfig))
    command = [sys.executable, "-m", "longleaf", "cluster", *options, "drain", name]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with Popen(command, stdout=PIPE, stderr=STDOUT, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def _read_until(process: Popen[str], said: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if said in line:
            return
    pytest.fail(f"ended without saying {said!r}: {seen}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_ended_drain_is_undone(release: Release, number: signal.Signals) -> None:
    name = "chat-longleaf-engine-0"
    with _draining(release, name) as process:
        _read_until(process, "leaves its Service")
        process.send_signal(number)
        said = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert f"{name} serves again" in said
    assert "is uncordoned" in said
    _as_it_was(release, name)


def test_what_the_api_server_misses_is_undone_when_it_is_back(release: Release) -> None:
    name = "chat-longleaf-engine-0"
    with _draining(release, name) as process:
        _read_until(process, "is cordoned")
        release.plane.stop_api_server()
        process.send_signal(signal.SIGTERM)
        try:
            assert process.poll() is None
        finally:
            release.plane.start_api_server()
        said = process.communicate(timeout=90)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert "is uncordoned" in said
    _as_it_was(release, name)


def test_what_cannot_be_undone_is_told_as_commands() -> None:
    said: list[str] = []
    done: list[str] = []

    def refused() -> None:
        raise ClusterError("no")

    undo = Undo(said.append, 1.0)
    undo.change(lambda: None, Step(lambda: done.append("first"), "first is back", "kubectl 1"))
    undo.change(lambda: None, Step(refused, "second is back", "kubectl 2"))
    with pytest.raises(ClusterError):
        undo.change(refused, Step(refused, "third is back", "kubectl 3"))
    undo.run()
    assert said == ["not undone (no); to undo it: kubectl 2", "first is back"]
    assert done == ["first"]


def test_drain_ends_an_engine_after_gateways_let_go_and_its_streams_end(
    release: Release, budget: dict[str, Any]
) -> None:
    plane = release.plane
    eventually(lambda: _allowed(release) == 1, "the budget allows one")
    # One of the two streams is on the engine that goes: least loaded is chosen.
    streams = [Stream(URL, 2500) for _ in range(2)]
    for stream in streams:
        assert stream.started.wait(60)
    name, address = "chat-longleaf-engine-1", ENGINES["chat-longleaf-engine-1"]
    old = plane.ask("GET", f"{PODS}/{name}")
    with _draining(release, name) as drain:
        eventually(
            lambda: plane.ask("GET", f"{PODS}/{name}")["metadata"].get("deletionTimestamp"),
            "the engine is evicted",
        )
        # Evicted, it is no longer sent to; it still answers.
        assert release.states(address) == {"draining"}
        assert not any(stream.ended.is_set() for stream in streams)
        assert "Draining" in release.call("status").stdout
        assert plane.ask("GET", f"/api/v1/nodes/{old['spec']['nodeName']}")["spec"]["unschedulable"]
        release.engines[name].send_signal(signal.SIGTERM)
        assert "1, 2, 3" in chat(URL)
        for stream in streams:
            assert stream.ended.wait(200)
            assert stream.tokens() == 2500
        assert release.engines[name].wait(timeout=30) == 0
        eventually(
            lambda: (f"http://{address}:30000", 2500) in release.answered(),
            "the gateway logs the stream of the engine that went",
        )
        plane.remove(f"{PODS}/{name}")
        said = drain.communicate(timeout=60)[0]
    assert drain.returncode == 0, said
    steps = ("is cordoned", "leaves its Service", "has let go", "is evicted", "is gone")
    assert sorted(steps, key=said.index) == list(steps)

    def successor() -> str | None:
        found = plane.find(f"{PODS}/{name}") or {"metadata": {}, "spec": {}}
        fresh = found["metadata"].get("uid") not in (None, old["metadata"]["uid"])
        return found["spec"].get("nodeName") if fresh else None

    assert eventually(successor, "its successor is placed") != old["spec"]["nodeName"]
    assert f"{old['spec']['nodeName']} (cordoned)" in release.call("status").stdout


def test_without_a_cluster_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    done = CliRunner().invoke(cluster_command, ["--kubeconfig", str(tmp_path / "no"), "status"])
    assert done.exit_code == 1
    assert "no cluster is configured" in done.stderr
    for text in ("[1]", "just words", "{", "clusters: 3"):
        path = tmp_path / "wrong"
        path.write_text(text)
        done = CliRunner().invoke(cluster_command, ["--kubeconfig", str(path), "status"])
        assert done.exit_code == 1
        assert "no cluster is configured" in done.stderr
    path = tmp_path / "away"
    ControlPlane.write_kubeconfig(path, "https://127.0.0.1:9")
    done = CliRunner().invoke(cluster_command, ["--kubeconfig", str(path), "status"])
    assert done.exit_code == 1
    assert "the API server cannot be reached" in done.stderr


def test_without_the_client_it_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['kubernetes'] = None; from longleaf.cli import main; "
        "main(['cluster', 'status'])"
    )
    done = run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "kubernetes is not installed: pip install kubernetes" in done.stderr


def test_a_refused_account_is_told(release: Release, tmp_path: Path) -> None:
    path = tmp_path / "wrong"
    ControlPlane.write_kubeconfig(path, release.api, "wrong-token")
    done = CliRunner().invoke(cluster_command, ["--kubeconfig", str(path), "status"])
    assert done.exit_code == 1
    assert "the API server answered 401: Unauthorized" in done.stderr
