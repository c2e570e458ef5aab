"""Helm against the control plane."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.charts.rendering import Tools
from tests.cluster.control_plane import ControlPlane


class Releases:
    """Installs the chart in namespaces of its own."""

    def __init__(
        self, tools: Tools, plane: ControlPlane, chart: Path, always: Mapping[str, str]
    ) -> None:
        self.tools = tools
        self._plane = plane
        self._chart = chart
        self._always = always

    def helm(self, *arguments: str, major: str = "4") -> str:
        """Standard output; ``HelmError``."""
        config = ("--kubeconfig", str(self._plane.kubeconfig))
        return self.tools.helm(*arguments, *config, major=major)

    def apply(
        self,
        verb: str,
        namespace: str,
        shape: str,
        *more: str,
        major: str = "4",
        **values: Any,
    ) -> str:
        """Install or upgrade the release ``chat``; names of values have __ for a dot."""
        sets: list[str] = []
        for name, value in self._always.items():
            sets += ["--set", f"{name}={value}"]
        for name, value in values.items():
            sets += ["--set-json", f"{name.replace('__', '.')}={json.dumps(value)}"]
        return self.helm(
            *(verb, "chat", str(self._chart), "-n", namespace, "--create-namespace"),
            *("-f", str(self._chart / "ci" / f"{shape}.yaml"), *sets, *more),
            major=major,
        )

    def token(self, namespace: str, account: str) -> str:
        """What pods of an account are handed."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self._plane.ask("POST", path, body)["status"]["token"])

    def objects(self, namespace: str) -> dict[str, dict[str, Any]]:
        """Objects of the release's kinds by kind and name, without those that the cluster makes."""
        found = {}
        for group, kinds in {
            "api/v1": ("services", "serviceaccounts", "configmaps", "pods"),
            "apis/apps/v1": ("deployments", "statefulsets"),
            "apis/rbac.authorization.k8s.io/v1": ("roles", "rolebindings"),
            "apis/networking.k8s.io/v1": ("networkpolicies", "ingresses"),
        }.items():
            for kind in kinds:
                path = f"/{group}/namespaces/{namespace}/{kind}"
                for name, one in self._plane.items(path).items():
                    if name.startswith("chat-"):
                        found[f"{kind}/{name}"] = one
        return found
