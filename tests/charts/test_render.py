"""Every shape of values through real Helm, held to the schemas of every supported Kubernetes."""

import json
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.charts.rendering import CHART, SHAPES, Rendered, Tools

KUBERNETES = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35")
CUSTOM = {"HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject", "ServiceMonitor"}


def test_shapes_are_the_agreed_ones() -> None:
    assert set(SHAPES) == {"default", "minimal", "full", "multi-node"}


@pytest.mark.parametrize("major", ["3", "4"])
def test_helm_lints_every_shape(tools: Tools, major: str) -> None:
    assert tools.helm("version", "--short", major=major).startswith(f"v{major}.")
    for path in SHAPES.values():
        assert "0 chart(s) failed" in tools.helm("lint", "--strict", CHART, "-f", path, major=major)


@pytest.mark.parametrize("version", KUBERNETES)
def test_shapes_fit_the_schemas_of_kubernetes(tools: Tools, version: str, tmp_path: Path) -> None:
    files = []
    for shape in SHAPES:
        rendered = tools.template(shape, kubernetes=f"{version}.0")
        files.append(tmp_path / f"{shape}.yaml")
        own = [one for one in rendered.objects if one["kind"] not in CUSTOM]
        assert len(own) >= 12
        files[-1].write_text("\n---\n".join(json.dumps(one) for one in own))
    done = subprocess.run(
        [tools.program("kubernetes-validate"), "--strict", "-k", version, *files],
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert not re.search(r"^(WARN|ERROR)", output, re.MULTILINE), output


def test_the_schemas_refuse_what_is_wrong(tools: Tools, tmp_path: Path) -> None:
    rendered = tools.template("default")
    one = rendered.engines
    one["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    path = tmp_path / "wrong.yaml"
    path.write_text(json.dumps(one))
    done = subprocess.run(
        [tools.program("kubernetes-validate"), "--strict", "-k", "1.33", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "livenessProb" in done.stdout + done.stderr


def _custom_faults(tools: Tools, objects: list[dict[str, object]]) -> str:
    done = subprocess.run(
        ["node", Path(__file__).parent / "crds" / "validate.mjs"],
        cwd=tools.folder,
        input=json.dumps(objects),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_custom_resources_fit_their_definitions(tools: Tools) -> None:
    objects = [one for one in tools.template("full").objects if one["kind"] in CUSTOM]
    assert {one["kind"] for one in objects} == CUSTOM
    assert _custom_faults(tools, objects) == ""
    for one in objects:
        one["spec"] = {"targets": 1, "rules": 1, "groups": 1}
    assert len(_custom_faults(tools, objects).splitlines()) >= len(objects)


def test_both_helms_render_the_same(tools: Tools) -> None:
    for shape in SHAPES:
        old, new = (tools.template(shape, major=major).objects for major in ("3", "4"))
        assert sorted(map(json.dumps, old)) == sorted(map(json.dumps, new))


def test_an_older_kubernetes_is_refused(tools: Tools) -> None:
    with pytest.raises(Exception, match=r"requires kubeVersion: >=1\.30"):
        tools.template("default", kubernetes="1.29.0")


@pytest.mark.parametrize("major", ["3", "4"])
def test_the_packed_chart_renders_the_same(tools: Tools, tmp_path: Path, major: str) -> None:
    """Rules and dashboards are links into ops/: they are packed as files."""
    tools.helm("package", CHART, "--destination", tmp_path, major=major)
    (packed,) = tmp_path.glob("longleaf-*.tgz")
    with tarfile.open(packed) as archive:
        assert not [member.name for member in archive.getmembers() if member.issym()]
    text = tools.helm(
        *("template", "chat", packed, "--namespace", "serving", "-f", SHAPES["full"]),
        *("--kube-version", "1.33.0"),
        major=major,
    )
    found, expected = Rendered(text).objects, tools.template("full").objects
    assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, expected))
