"""Runs Helm and reads what it renders."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

CHART = Path(__file__).parents[2] / "charts" / "longleaf"
SHAPES = {path.stem: path for path in sorted((CHART / "ci").glob("*.yaml"))}

Object = dict[str, Any]


class HelmError(Exception):
    """Helm refused; the message is its standard error."""


@dataclass(frozen=True)
class Tools:
    """What tests/charts/tools.sh installed."""

    folder: Path

    @property
    def helms(self) -> dict[str, Path]:
        """Helm's binaries by major version."""
        return {major: self.folder / "bin" / f"helm{major}" for major in ("3", "4")}

    def program(self, name: str) -> Path:
        """A Python tool."""
        return self.folder / "venv" / "bin" / name

    def helm(self, *arguments: str | Path, major: str = "4") -> str:
        """Standard output of a Helm command; ``HelmError``."""
        done = subprocess.run(
            [self.helms[major], *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HELM_NO_PLUGINS": "1"},
        )
        if done.returncode != 0:
            raise HelmError(done.stderr + done.stdout)
        return done.stdout

    def template(
        self,
        shape: str = "default",
        values: Mapping[str, Any] | None = None,
        *,
        release: str = "chat",
        kubernetes: str = "1.33.0",
        major: str = "4",
    ) -> "Rendered":
        """What the chart renders with a shape's values and, over them, ``values``."""
        sets = [word for name, value in (values or {}).items() for word in _set(name, value)]
        text = self.helm(
            *("template", release, CHART, "--namespace", "serving", "-f", SHAPES[shape]),
            *("--kube-version", kubernetes, *sets),
            major=major,
        )
        return Rendered(text)


def _set(name: str, value: Any) -> tuple[str, str]:
    return "--set-json", f"{name}={json.dumps(value)}"


class Rendered:
    """Objects of one rendering."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.objects: list[Object] = [one for one in yaml.safe_load_all(text) if one]

    def of(self, kind: str, name: str | None = None) -> Object:
        """The one object of a kind (and name)."""
        found = [
            one
            for one in self.objects
            if one["kind"] == kind and name in (None, one["metadata"]["name"])
        ]
        assert len(found) == 1, f"{len(found)} objects {kind} {name or ''}"
        return found[0]

    def kinds(self) -> set[str]:
        """Kinds that there are."""
        return {one["kind"] for one in self.objects}

    def pod_specs(self) -> Iterator[tuple[str, Object]]:
        """Name and pod specification of everything that makes pods."""
        for one in self.objects:
            if one["kind"] == "Pod":
                yield one["metadata"]["name"], one["spec"]
            elif one["kind"] in {"Deployment", "StatefulSet"}:
                yield one["metadata"]["name"], one["spec"]["template"]["spec"]

    @property
    def engines(self) -> Object:
        """StatefulSet of the engines."""
        (found,) = (
            one
            for one in self.objects
            if one["kind"] == "StatefulSet" and one["metadata"]["name"].endswith("-engine")
        )
        return found

    @property
    def engine(self) -> Object:
        """Pod specification of the engines."""
        spec: Object = self.engines["spec"]["template"]["spec"]
        return spec

    @property
    def gateway(self) -> Object:
        """Pod specification of the gateways."""
        spec: Object = self.of("Deployment")["spec"]["template"]["spec"]
        return spec


def container(spec: Object, name: str) -> Object:
    """A container, or an init container, of a pod specification."""
    everything = [*spec["containers"], *spec.get("initContainers", ())]
    found: list[Object] = [one for one in everything if one["name"] == name]
    assert len(found) == 1, f"{len(found)} containers {name}"
    return found[0]


def environment(one: Object) -> dict[str, Any]:
    """Environment of a container: values, or where they come from."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in one["env"]}


def load_yaml(path: Path) -> Any:
    """Read a YAML file."""
    return yaml.safe_load(path.read_text())
