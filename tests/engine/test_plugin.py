"""The plugin in the real wheel: each start is a process of its own, as SGLang's are."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import MODELS
from tests.engine.starts import Starts

ARGUMENTS = [
    *("--model-path", str(MODELS / "tiny-target"), "--attention-backend", "longleaf_mla"),
    *("--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", "32"),
    *("--speculative-draft-model-path", str(MODELS / "tiny-drafter"), "--page-size", "1"),
]
pytestmark = pytest.mark.usefixtures("sglang", "installed_plugin")


@pytest.fixture(scope="module")
def starts() -> Iterator[Starts]:
    made = Starts()
    yield made
    made.close()


def test_sglangs_loader_registers_algorithm_and_backend(starts: Starts, tmp_path: Path) -> None:
    done = starts.run(
        f"""
from longleaf.engine import check, guard
check.check_all({ARGUMENTS!r}, gpu=False)
print([item.__name__ for item in guard.check_registrations()])
""",
        tmp_path,
        LONGLEAF_ENGINE_GUARD="1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['DDTreeAlgorithm', 'LongleafMlaBackend']"


PLANTS = {
    "version": ("pins.SGLANG_VERSION = '0.5.18'", "written against SGLang 0.5.18"),
    "source": (
        "pins.SOURCES['sglang.srt.models.dflash'] = '0' * 64",
        "sglang.srt.models.dflash differs",
    ),
    "patch": (
        "from longleaf.engine import hooks\n"
        "from longleaf.engine.patches import Patch, apply_all\n"
        "patch = Patch(1, 'x', 'y', 'sglang.version', '0' * 64, print)\n"
        "hooks.apply_all = lambda: apply_all([patch])",
        "patch 1 (x) expects sglang.version",
    ),
    "backend": (
        "from longleaf.engine import backend\nbackend.register = lambda: None",
        "attention backend longleaf_mla is None",
    ),
    "broken": (
        "from longleaf.engine import backend\n"
        "def fail(): raise KeyError('gone')\nbackend.register = fail",
        "cannot be registered (KeyError: 'gone')",
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_drift_ends_the_process_with_one_sentence(
    starts: Starts, tmp_path: Path, plant: str
) -> None:
    code, said = PLANTS[plant]
    done = starts.run(
        f"""
from longleaf.engine import pins
{code}
from sglang.srt.plugins import load_plugins
load_plugins()
print("went on")
""",
        tmp_path,
        LONGLEAF_ENGINE_GUARD="1",
    )
    assert done.returncode == 2
    assert "went on" not in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("longleaf engine: ")
    assert said in last
    assert "; fix: " in last


def test_a_drift_before_the_patches_leaves_sglang_untouched(starts: Starts, tmp_path: Path) -> None:
    done = starts.run(
        """
from longleaf.engine import pins, plugin
from longleaf.engine.drift import DriftError
pins.SOURCES["sglang.srt.models.dflash"] = "0" * 64
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.speculative.spec_registry import get_spec
try:
    plugin.register()
except DriftError:
    print("longleaf_mla" in ATTENTION_BACKENDS, get_spec("DDTREE"))
""",
        tmp_path,
    )
    assert done.stdout.splitlines()[-1:] == ["False None"], done.stderr


def test_a_plugin_that_is_left_out_is_named(starts: Starts, tmp_path: Path) -> None:
    done = starts.run(
        f"""
from longleaf.engine import check
check.check_all({ARGUMENTS!r}, gpu=False)
""",
        tmp_path,
        SGLANG_PLUGINS="another",
    )
    assert "SGLANG_PLUGINS=another leaves longleaf out" in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"vocab_size": 4097}, "vocab_size is 4097, the target's is 4096"),
        ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 1}}, "layers 0 to 2"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_through_sglangs_own_parser(
    starts: Starts, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    config = json.loads((MODELS / "tiny-drafter/config.json").read_text())
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps({**config, **change}))
    arguments = [str(drafter) if item.endswith("tiny-drafter") else item for item in ARGUMENTS]
    done = starts.run(
        f"""
from longleaf.engine import check
everything = check.check_all
check.check_all = lambda argv: everything(argv, gpu=False)
raise SystemExit(check.main({arguments!r}))
""",
        tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr.strip().splitlines()[-1]
