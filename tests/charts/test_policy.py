"""checkov over every shape, with a reason for each waiver."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.charts.rendering import CHART, SHAPES, Tools

WAIVERS = {
    "CKV_K8S_8": "the test pod runs once and ends: nothing to keep alive",
    "CKV_K8S_9": "the test pod runs once and ends: nothing to route to",
    "CKV_K8S_11": "a CPU limit throttles an event loop in the middle of a stream; requests share",
    "CKV_K8S_15": "tags are versions and digests are accepted: pulling again at every start would "
    "tie a restart to the registry",
    "CKV_K8S_35": "SGLang takes its key as an argument and the hub's client a variable; the "
    "gateway's own keys are a file",
    "CKV_K8S_38": "the gateway's token is what it watches EndpointSlices with",
    "CKV_K8S_43": "the chart cannot know the digest of an image that its user builds; "
    "image.digest takes one",
}
ONLY = {
    "CKV_K8S_8": "Pod.serving.chat-longleaf-test-chat",
    "CKV_K8S_9": "Pod.serving.chat-longleaf-test-chat",
    "CKV_K8S_38": "Deployment.serving.chat-longleaf-gateway",
}
"""Waivers for one object alone."""


@pytest.fixture(scope="module")
def failed(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("rendered")
    for shape in SHAPES:
        (folder / f"{shape}.yaml").write_text(tools.template(shape).text)
    return _run(tools, folder)


def _run(
    tools: Tools, folder: Path, framework: str = "kubernetes", passed: int = 200
) -> set[tuple[str, str]]:
    done = subprocess.run(
        [
            *(tools.program("checkov"), "-d", folder, "--framework", framework),
            *("--compact", "--quiet", "--skip-download", "-o", "json"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    document = json.loads(done.stdout)
    assert document["summary"]["parsing_errors"] == 0
    assert document["summary"]["passed"] > passed
    return {(one["check_id"], one["resource"]) for one in document["results"]["failed_checks"]}


def test_only_what_is_waived_fails(failed: set[tuple[str, str]]) -> None:
    unexplained = {
        (check, resource)
        for check, resource in failed
        if check not in WAIVERS or resource != ONLY.get(check, resource)
    }
    assert unexplained == set()


def test_no_waiver_is_left_over(failed: set[tuple[str, str]]) -> None:
    assert {check for check, _ in failed} == set(WAIVERS)


DOCKERFILE = {
    "CKV_DOCKER_2": "an OCI image carries no HEALTHCHECK: the chart has probes, whose question "
    "differs between gateway and engine",
    "CKV_DOCKER_7": "bases are build arguments whose defaults have tags",
}


def test_the_dockerfile_fails_what_is_waived_alone(tools: Tools, tmp_path: Path) -> None:
    shutil.copy(CHART.parents[1] / "Dockerfile", tmp_path)
    found = _run(tools, tmp_path, "dockerfile", passed=100)
    assert {check for check, _ in found} == set(DOCKERFILE)


def test_a_privileged_pod_would_be_found(tools: Tools, tmp_path: Path) -> None:
    rendered = tools.template("default", {"gateway.securityContext": {"privileged": True}})
    (tmp_path / "wrong.yaml").write_text(rendered.text)
    assert ("CKV_K8S_16", "Deployment.serving.chat-longleaf-gateway") in _run(tools, tmp_path)
