"""Rules of the house that no linter knows."""

import ast
import importlib.metadata
import json
import math
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "service" / "longleaf"
METRIC_TYPES = {"Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"}
INSTALLED_BYTES_LIMIT = 150_000_000


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_metrics_are_defined_in_one_module() -> None:
    offenders = []
    for path in SERVICE.rglob("*.py"):
        if path == SERVICE / "metrics.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", None))
                first = node.args[0] if node.args else None
                named = isinstance(first, ast.Constant) and str(first.value).startswith("longleaf_")
                if name in METRIC_TYPES and named:
                    offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert offenders == []


def test_top_level_is_as_agreed() -> None:
    allowed = {"Dockerfile", "charts", "service", "kernels", "ops", "loadtest", "tests"}
    folders = {path.relative_to(ROOT).parts[0] for path in tracked_files() if path.parent != ROOT}
    assert folders - allowed - {".ci"} == set()


def test_no_file_depends_on_a_place_outside_the_repository() -> None:
    outside = re.compile(r"(\.\./shared/|/work/|/tmp/plan|/tmp/ref|/opt/pypi)")
    own = Path(__file__).resolve()
    offenders = []
    for path in tracked_files():
        if path == own or path.suffix in {".safetensors", ".npz", ".xz", ".png"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if outside.search(line):
                offenders.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert offenders == []


def test_repository_travels() -> None:
    """Repository plus a 39 MB payload must stay under 64 MiB; weights under 12 MiB."""
    sizes = {path: path.stat().st_size for path in tracked_files()}
    weights = sum(size for path, size in sizes.items() if path.suffix == ".safetensors")
    assert 0 < weights <= 12 * 2**20
    assert sum(sizes.values()) <= 64 * 2**20 - 39_000_000


def test_installed_service_is_light() -> None:
    """What the locked runtime dependencies and the service itself take on disk."""
    locked = re.findall(
        r"^([a-z0-9_.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )
    total = sum(path.stat().st_size for path in SERVICE.rglob("*") if path.is_file())
    for name in locked:
        for file in importlib.metadata.files(name) or []:
            path = Path(str(file.locate()))
            total += path.stat().st_size if path.is_file() else 0
    assert 60_000_000 < total <= INSTALLED_BYTES_LIMIT


def test_service_imports_without_torch() -> None:
    names = {
        name
        for path in SERVICE.rglob("*.py")
        if SERVICE / "engine" not in path.parents
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }
    assert {
        name for name in names if name.split(".")[0] in {"torch", "transformers", "scipy"}
    } == set()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "ops" / "results").glob("*.json")), ids=lambda path: path.name
)
def test_results_have_the_agreed_format(path: Path) -> None:
    document = json.loads(path.read_text())
    assert {"bench", "date", "commit", "machine", "command", "rows"} <= set(document)
    assert {"cpu", "gpu", "driver"} <= set(document["machine"])
    assert document["rows"]
    names = [row["name"] for row in document["rows"]]
    assert len(names) == len(set(names))
    for row in document["rows"]:
        assert {"name", "value", "unit"} <= set(row)
        if row["value"] is None:
            assert row["why"]
        else:
            assert math.isfinite(row["value"])
