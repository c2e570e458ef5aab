"""A real control plane on loopback: etcd, API server, controller manager, scheduler; no kubelet.

Pods are scheduled and never run: a test starts processes itself, and writes pods' states as a
kubelet would.
"""

import contextlib
import http.client
import json
import random
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
LIMIT = 120.0
_ADMIN = "admin-token"
_MERGE = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to connections: one of these
    may be taken between now and when the API server listens, which is seconds later.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def eventually(
    ask: Callable[[], T | None], what: str, limit: float = LIMIT, pause: float = 0.1
) -> T:
    """Ask until there is an answer that is neither None nor false."""
    deadline = time.monotonic() + limit
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {limit:.0f} s: {what}"
        time.sleep(pause)


class ControlPlane:
    """Started by `start`, stopped by `stop`; the API server can be stopped and started alone."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries = binaries
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd, self._etcd_peer, self.port = free_port(), free_port(), free_port()
        self._tls = ssl._create_unverified_context()
        self.kubeconfig = folder / "kubeconfig"

    def start(self) -> None:
        """Start everything and wait until it works."""
        folder = self._folder
        subprocess.run(
            ["openssl", "genrsa", "-out", folder / "accounts.key", "2048"],
            check=True,
            capture_output=True,
        )
        (folder / "tokens.csv").write_text(f'{_ADMIN},admin,1,"system:masters"\n')
        self.write_kubeconfig(self.kubeconfig, f"https://127.0.0.1:{self.port}")
        url, peer = f"http://127.0.0.1:{self._etcd}", f"http://127.0.0.1:{self._etcd_peer}"
        self._run(
            "etcd",
            *(shutil.which("etcd") or "etcd", "--data-dir", str(folder / "etcd")),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
        )
        self.start_api_server()
        self._run(
            "kube-controller-manager",
            *("--kubeconfig", str(self.kubeconfig), "--bind-address=127.0.0.1", "--port=0"),
            *(f"--secure-port={free_port()}", "--leader-elect=false"),
            f"--service-account-private-key-file={folder / 'accounts.key'}",
            f"--cert-dir={folder / 'manager'}",
            # No kubelet renews the nodes' leases.
            "--node-monitor-grace-period=24h",
        )
        self._run(
            "kube-scheduler",
            *("--kubeconfig", str(self.kubeconfig), "--bind-address=127.0.0.1", "--port=0"),
            *(f"--secure-port={free_port()}", "--leader-elect=false"),
            f"--cert-dir={folder / 'scheduler'}",
        )
        eventually(
            lambda: self.find("/api/v1/namespaces/default/serviceaccounts/default"),
            "the controller manager makes accounts",
        )

    def start_api_server(self) -> None:
        """Start the API server, and wait until it is ready."""
        key = self._folder / "accounts.key"
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            *("--bind-address=127.0.0.1", f"--secure-port={self.port}", "--insecure-port=0"),
            f"--cert-dir={self._folder / 'certificates'}",
            *("--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=RBAC"),
            f"--token-auth-file={self._folder / 'tokens.csv'}",
            *("--service-account-issuer=https://issuer.test", "--advertise-address=127.0.0.1"),
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            "--endpoint-reconciler-type=none",
        )
        eventually(self._ready, "the API server is ready")

    @staticmethod
    def write_kubeconfig(path: Path, url: str, token: str = _ADMIN) -> None:
        """For the API server at a URL, by default as its administrator."""
        cluster = {"server": url, "insecure-skip-tls-verify": True}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": {"token": token}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )

    def stop_api_server(self) -> None:
        """End the API server."""
        self._stop("kube-apiserver")

    def stop(self) -> None:
        """End everything."""
        for name in reversed(list(self._processes)):
            self._stop(name)

    def _run(self, name: str, *arguments: str) -> None:
        path = self._binaries / name
        command = [str(path), *arguments] if path.exists() else list(arguments)
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
            )

    def _stop(self, name: str) -> None:
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL if name == "kube-apiserver" else signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ready(self) -> bool:
        for name, process in self._processes.items():
            log = self._folder / f"{name}.log"
            assert process.poll() is None, f"{name} ended: {log.read_text()[-2000:]}"
        try:
            return bool(self.ask("GET", "/readyz") == "ok")
        except (OSError, ApiError):
            return False

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        token: str = _ADMIN,
        kind: str = "application/json",
    ) -> Any:
        """Answer of the API server: JSON, or text; ``ApiError``."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=30, context=self._tls
        )
        headers = {"authorization": f"Bearer {token}", "content-type": kind}
        try:
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 400:
            raise ApiError(answer.status, text)
        return json.loads(text) if text.startswith("{") and "watch=" not in path else text

    def find(self, path: str) -> Any:
        """The object at a path, or None."""
        try:
            return self.ask("GET", path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    def remove(self, path: str) -> None:
        """Delete an object at once. One that has gone by itself is as good as deleted."""
        try:
            self.ask("DELETE", f"{path}?gracePeriodSeconds=0")
        except ApiError as error:
            if error.status != 404:
                raise

    def remove_all(self, path: str) -> None:
        """Delete the objects of a list at once, also while a controller deletes them too."""
        for name in self.items(path):
            self.remove(f"{path}/{name}")

    def items(self, path: str) -> dict[str, Any]:
        """Objects of a list by name."""
        return {one["metadata"]["name"]: one for one in self.ask("GET", path)["items"]}

    def add_node(
        self,
        name: str,
        labels: Mapping[str, str],
        *,
        gpus: int = 0,
        taints: list[dict[str, str]] | None = None,
        kubelet: tuple[str, int] | None = None,
    ) -> None:
        """A node as its kubelet (at an address and port) and the GPU operator describe it."""
        spec = {"taints": taints or []}
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec}
        self.ask("POST", "/api/v1/nodes", node)
        room = {"cpu": "128", "memory": "1Ti", "pods": "110", "ephemeral-storage": "2Ti"}
        if gpus:
            room["nvidia.com/gpu"] = str(gpus)
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
        status: dict[str, Any] = {"capacity": room, "allocatable": room, "conditions": [ready]}
        if kubelet is not None:
            status["addresses"] = [{"type": "InternalIP", "address": kubelet[0]}]
            status["daemonEndpoints"] = {"kubeletEndpoint": {"Port": kubelet[1]}}
        self.ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, kind=_MERGE)

    def label_node(self, name: str, labels: Mapping[str, str]) -> None:
        """Set labels of a node."""
        body = {"metadata": {"labels": labels}}
        self.ask("PATCH", f"/api/v1/nodes/{name}", body, kind=_MERGE)

    def run_pod(self, namespace: str, name: str, address: str) -> None:
        """Write the state of a pod that runs and is ready at an address."""
        conditions = [
            {"type": kind, "status": "True"} for kind in ("Initialized", "ContainersReady", "Ready")
        ]
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": conditions,
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        self.ask("PATCH", path, {"status": status}, kind=_MERGE)
