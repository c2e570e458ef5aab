"""The cluster, through the user's own kubectl: its contexts, logins and plugins work as they do."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SECONDS = 60.0


class KubectlError(RuntimeError):
    """kubectl is not there, or refused; the message is its own."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """One release. program: kubectl with whatever selects the cluster."""

    program: tuple[str, ...]
    namespace: str
    release: str

    @property
    def selector(self) -> str:
        """Labels of the release's objects."""
        return f"app.kubernetes.io/instance={self.release}"

    def run(self, *arguments: str, seconds: float = _SECONDS) -> str:
        """Standard output of a command in the release's namespace; ``KubectlError``."""
        command = [*self.program, "--namespace", self.namespace, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False
            )
        except FileNotFoundError as error:
            raise KubectlError(f"{self.program[0]} is not there: install kubectl") from error
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl {arguments[0]} took more than {seconds:.0f} s") from error
        if done.returncode != 0:
            raise KubectlError(done.stderr.strip() or f"kubectl ended with {done.returncode}")
        return done.stdout

    def list(self, kind: str, *more: str) -> list[Mapping[str, Any]]:
        """Objects of a kind; by default the release's own."""
        selected = more or ("--selector", self.selector)
        items: list[Mapping[str, Any]] = json.loads(
            self.run("get", kind, *selected, "--output", "json")
        )["items"]
        return items
