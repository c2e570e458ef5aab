import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.charts.rendering import Rendered, Tools
from tests.serve.test_serve import free_ports


@pytest.fixture(scope="session")
def tools() -> Tools:
    folder = os.environ.get("LONGLEAF_CHART_TOOLS")
    if folder is None:
        pytest.skip("needs Helm and schemas: make test-chart installs them")
    return Tools(Path(folder))


@pytest.fixture(scope="session")
def default(tools: Tools) -> Rendered:
    return tools.template("default")


@pytest.fixture(scope="session")
def full(tools: Tools) -> Rendered:
    return tools.template("full")


@pytest.fixture(scope="session")
def minimal(tools: Tools) -> Rendered:
    return tools.template("minimal")


@pytest.fixture(scope="session")
def multi_node(tools: Tools) -> Rendered:
    return tools.template("multi-node")


@pytest.fixture(scope="session")
def gateway_url() -> Iterator[str]:
    """A gateway with the embedded engine behind it."""
    ports = [str(port) for port in free_ports(3)]
    command = [
        *(sys.executable, "-m", "longleaf", "serve", "--port", ports[0]),
        *("--metrics-port", ports[1], "--engine-port", ports[2]),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready"), line
            yield f"http://127.0.0.1:{ports[0]}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=90)
