"""Real SGLang servers for these tests, started side by side by the first test that needs one.

A test names its servers with ``@pytest.mark.servers(...)`` and takes the fixture ``fleet``. All
servers that the selected tests name start together, so one selection costs one start.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.tokenizer import Tokenizer
from ops.bench.prompts import PromptSource
from ops.gpu.pairs import LOGS
from ops.gpu.servers import Server, free_port
from tests.gpu.engine.fleet import SPECS, Fleet, gpus_needed

HERE = Path(__file__).parent


def why_not(gpus: int) -> str | None:
    """Return why a test that needs that many GPUs cannot run here."""
    try:
        import torch
    except ImportError:
        return "needs torch"
    try:
        version("sglang")
    except PackageNotFoundError:
        return "needs SGLang (ops/gpu/host.sh)"
    found = torch.cuda.device_count()
    return f"needs {gpus} GPUs, there are {found}" if found < gpus else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "servers(*names): the servers of tests/gpu/engine/fleet.py")


def _names(item: pytest.Item) -> tuple[str, ...]:
    return tuple(name for mark in item.iter_markers("servers") for name in mark.args)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents or item.get_closest_marker("skip"):
            continue
        reason = why_not(max((gpus_needed(name) for name in _names(item)), default=1))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    wanted: dict[str, None] = {}
    for item in request.session.items:
        if HERE in item.path.parents and not item.get_closest_marker("skip"):
            wanted |= dict.fromkeys(_names(item))
    servers = {
        name: Server(SPECS[name](), free_port(index), LOGS) for index, name in enumerate(wanted)
    }
    try:
        yield Fleet(servers)
    finally:
        for server in servers.values():
            server.stop()


@pytest.fixture(scope="session")
def source() -> PromptSource:
    return PromptSource(Tokenizer.load(DEFAULT_MODELS / "tiny-target"))
