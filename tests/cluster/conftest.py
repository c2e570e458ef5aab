import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.charts.rendering import CHART, Tools
from tests.cluster.control_plane import ControlPlane
from tests.cluster.releases import Releases

# What Kubernetes 1.20 does not know: policy/v1.
OLD = {
    "engine.podDisruptionBudget.enabled": "false",
    "gateway.podDisruptionBudget.enabled": "false",
}


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    binaries = os.environ.get("LONGLEAF_CONTROL_PLANE")
    if binaries is None:
        pytest.skip("needs a control plane: make test-cluster builds one")
    plane = ControlPlane(Path(binaries), tmp_path_factory.mktemp("plane"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def releases(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Releases:
    """The chart as it is, but for the version of Kubernetes that it asks for."""
    tools = Tools(Path(os.environ["LONGLEAF_CHART_TOOLS"]))
    chart = tmp_path_factory.mktemp("chart") / "longleaf"
    shutil.copytree(CHART, chart)
    description = chart / "Chart.yaml"
    lines = description.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("kubeVersion:")]
    assert len(kept) == len(lines) - 1
    description.write_text("".join(kept))
    return Releases(tools, plane, chart, OLD)
