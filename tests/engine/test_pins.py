"""Every file and function that the plugin relies on is in the pinned wheel, and is pinned."""

import ast
from pathlib import Path

import pytest

from longleaf.engine import guard, pins
from longleaf.engine.drift import DriftError, source_path, source_sha256
from tests.engine.conftest import ENGINE


def imported_modules(path: Path) -> set[str]:
    """Modules of SGLang that a file imports, or imports names from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
            for name in node.names:
                module = f"{node.module}.{name.name}"
                try:
                    source_path(module)
                except DriftError:
                    module = str(node.module)
                found.add(module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("sglang")}
    return found


@pytest.mark.usefixtures("sglang")
def test_every_module_that_is_imported_is_pinned() -> None:
    missing = {
        f'"{module}": "{source_sha256(module)}",'
        for path in ENGINE.rglob("*.py")
        for module in imported_modules(path) - set(pins.SOURCES)
    }
    assert not missing, "add to SOURCES in pins.py:\n" + "\n".join(sorted(missing))


@pytest.mark.usefixtures("sglang")
def test_the_wheel_is_the_pinned_one() -> None:
    guard.check_versions()
    guard.check_sources()
    guard.check_signatures()


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("module", pins.SOURCES)
def test_a_changed_file_is_caught(module: str) -> None:
    digest = pins.SOURCES[module]
    changed = {**pins.SOURCES, module: digest[:-1] + ("0" if digest[-1] != "0" else "1")}
    with pytest.raises(DriftError, match=f"{module} differs .*; fix: pip install") as caught:
        guard.check_sources(changed)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, functions in pins.SIGNATURES.items() for name in functions],
)
def test_a_changed_signature_is_caught(module: str, name: str) -> None:
    expected = pins.SIGNATURES[module][name]
    with pytest.raises(DriftError, match="expected"):
        guard.check_signatures({module: {name: expected[:-1] + ", more)"}})
    with pytest.raises(DriftError, match="has no function"):
        guard.check_signatures({module: {name + "_gone": expected}})


def test_another_version_of_sglang_is_refused() -> None:
    with pytest.raises(DriftError, match=r"against SGLang 0\.5\.17, found 0\.5\.18"):
        guard.check_versions({"sglang": "0.5.18"})
    with pytest.raises(DriftError, match="not installed"):
        guard.check_versions({})


@pytest.mark.parametrize(
    ("torch", "cuda", "named"),
    [("2.13.0+cpu", "13.0", r"torch 2\.11"), ("2.11.0", None, "none"), ("2.11.0", "12.8", "12.8")],
)
def test_another_torch_or_cuda_is_refused(torch: str, cuda: str | None, named: str) -> None:
    with pytest.raises(DriftError, match=named):
        guard.check_platform(torch, cuda)
    guard.check_platform("2.11.0+cu130", "13.0")


def test_the_kernels_abi_is_the_pinned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from longleaf_kernels import _library

    assert _library.ABI_VERSION == pins.KERNELS_ABI_VERSION
    monkeypatch.setattr(_library, "ABI_VERSION", pins.KERNELS_ABI_VERSION + 1)
    with pytest.raises(DriftError, match="kernels and service of one commit"):
        guard.check_kernels()


def test_a_missing_kernels_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from longleaf_kernels import _library

    _library.library.cache_clear()
    monkeypatch.setenv(_library.PATH_VARIABLE, str(tmp_path / "none.so"))
    try:
        with pytest.raises(DriftError, match=r"none\.so.*; fix: make kernels"):
            guard.check_kernels()
    finally:
        _library.library.cache_clear()
