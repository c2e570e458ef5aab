"""The Dockerfile as far as it goes without building: lists, sources, stages, hadolint."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from longleaf import __version__
from tests.engine.stubs import STUBBED

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+)", re.MULTILINE)


def _pins(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text()
    return {found.lower().replace("_", "-"): version for found, version in PIN.findall(text)}


@pytest.mark.parametrize(
    "name", ["requirements.lock", "ops/gpu/payload.txt", "requirements-image.txt"]
)
def test_everything_is_pinned_by_hash(name: str) -> None:
    blocks = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / name).read_text())
    pinned = [block for block in blocks if PIN.match(block)]
    assert len(pinned) > 20
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", block) for block in pinned)


def test_the_engines_lists_are_the_whole_of_what_it_needs() -> None:
    """All that SGLang imports on a CPU (requirements-engine.txt), once; torch is the base's."""
    payload, image = _pins("ops/gpu/payload.txt"), _pins("requirements-image.txt")
    assert set(payload) & set(image) == set()
    needed = set(_pins("requirements-engine.txt")) - {"triton"}
    assert needed - set(payload) - set(image) == set()
    # What its CPU tests stand in for, and what they have by way of torch's list.
    stood_in = {"sgl-kernel": "sglang-kernel", "flashinfer": "flashinfer-python"}
    stubbed = {
        stood_in.get(name, name) for name in (one.lower().replace("_", "-") for one in STUBBED)
    }
    assert stubbed - set(payload) - set(image) == set()
    assert {"packaging", "pygments", "traitlets", "cffi", "ninja"} <= set(image)
    assert payload["sglang"] == "0.5.17"
    assert {"click", "huggingface-hub", "transformers"} <= set(image)


def test_every_source_is_in_the_context() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    sources = [
        word
        for line in re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE)
        for word in line.split()[:-1]
    ]
    assert len(sources) >= 5
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == name or source.startswith(f"{name}/") for name in kept), source


def test_stages_resolve() -> None:
    bases = re.findall(r"^FROM (\S+) AS (\S+)$", TEXT, re.MULTILINE)
    arguments = set(re.findall(r"^ARG ([A-Z_]+)=\S+$", TEXT, re.MULTILINE))
    assert [name for _, name in bases] == ["packages", "gateway", "kernels", "engine"]
    assert {base[2:-1] for base, _ in bases} <= arguments
    assert set(re.findall(r"--from=(\S+)", TEXT)) <= {name for _, name in bases}
    for target in ("gateway", "engine"):
        stage = TEXT.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        assert "USER 10001:10001" in stage
        assert "STOPSIGNAL SIGTERM" in stage
        assert 'ENTRYPOINT ["longleaf"]' in stage
        assert "org.opencontainers.image.licenses" in stage


def test_images_and_chart_have_the_services_version() -> None:
    """The chart's images are tagged with it, and its README builds them so."""
    chart = (ROOT / "charts/longleaf/Chart.yaml").read_text()
    assert f"\nappVersion: {__version__}\n" in chart
    assert set(re.findall(r"^ARG VERSION=(\S+)$", TEXT, re.MULTILINE)) == {__version__}
    for text in (TEXT, (ROOT / "charts/longleaf/README.md").read_text()):
        tags = re.findall(r"-t longleaf/(?:gateway|engine):?(\S*)", text)
        assert set(tags) == {__version__}, tags


def test_the_engines_user_has_a_name_and_a_home() -> None:
    """Python's getpass.getuser, which SGLang names a cache after, fails for a uid without one."""
    stage = TEXT.partition(" AS engine\n")[2]
    assert " USER=longleaf " in stage
    assert " HOME=/tmp " in stage  # without one, SGLang's import writes to /.cache


def test_hadolint_finds_nothing() -> None:
    tools = os.environ.get("LONGLEAF_CHART_TOOLS")
    if tools is None:
        pytest.skip("needs hadolint: make test-chart installs it")
    done = subprocess.run(
        [Path(tools) / "venv/bin/hadolint", ROOT / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
