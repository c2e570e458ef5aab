"""The real SGLang wheel with stubs for its compiled parts, where it is installed.

`make test-engine` makes such an environment. Elsewhere the tests that need SGLang are skipped.
"""

import importlib
import importlib.util
import warnings
from pathlib import Path

import pytest

from longleaf.engine import pins
from tests.engine import stubs

if importlib.util.find_spec("sglang") is not None:
    stubs.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's own, about the GPU that is missing
        for module in ("sglang.srt.entrypoints.http_server", *pins.SIGNATURES):
            importlib.import_module(module)

MODELS = Path(__file__).parents[2] / "service/longleaf/embedded/models"
ENGINE = Path(__file__).parents[2] / "service/longleaf/engine"


@pytest.fixture(name="sglang")
def needs_sglang() -> None:
    pytest.importorskip("sglang")


@pytest.fixture
def installed_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin as an installed distribution: metadata beside the package are enough."""
    metadata = tmp_path / "longleaf-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: longleaf\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nlongleaf = longleaf.engine.plugin:register\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
