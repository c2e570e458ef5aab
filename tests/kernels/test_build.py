"""The build's and the loader's messages, and what a rebuild compiles. Needs neither nvcc nor torch;
a script stands for nvcc where one must run."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import cuda_build
from cuda_build import BuildError, Toolkit, Unit, find_toolkit, parse_archs

HELD = '#!/bin/sh\necho "Cuda compilation tools, release {version}, V{version}.0"\n'


def toolkit_at(root: Path, version: str, libraries: str = "lib64") -> Path:
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(HELD.format(version=version))
    nvcc.chmod(0o755)
    (root / libraries).mkdir()
    (root / libraries / "libcudart_static.a").touch()
    return nvcc


def nowhere(path: Path) -> Mapping[str, str]:
    """An environment whose PATH has nothing."""
    return {"PATH": str(path)}


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the toolkits of this machine that are found without the environment."""
    is_file = Path.is_file

    def elsewhere(self: Path) -> bool:
        return is_file(self) and not str(self).startswith("/usr/local/cuda")

    monkeypatch.setattr(Path, "is_file", elsewhere)
    monkeypatch.setattr(sys, "path", [])


@pytest.mark.usefixtures("no_toolkit")
def test_without_nvcc_the_message_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as refusal:
        find_toolkit(nowhere(tmp_path))
    message = str(refusal.value)
    for part in ("compiled with nvcc", "PATH", "CUDA_HOME", "12.8", "pip install nvidia-cuda-nvcc"):
        assert part in message
    assert "No GPU is needed" in message


def test_the_command_ends_with_that_message_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, cuda_build.__file__],
        env={"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"error: CUDA_HOME is {tmp_path}, which has no bin/nvcc\n"


@pytest.mark.usefixtures("no_toolkit")
def test_where_nvcc_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_HOME before PATH before the wheels of the interpreter."""
    home = toolkit_at(tmp_path / "home", "13.0")
    on_path = toolkit_at(tmp_path / "path", "12.9")
    site = tmp_path / "site-packages"
    wheels = toolkit_at(site / "nvidia" / "cu13", "13.1", libraries="lib")
    monkeypatch.setattr(sys, "path", [str(site)])
    # /bin for the shell that runs the stand-in.
    path = f"{on_path.parent}:/bin"
    found = find_toolkit({"PATH": path, "CUDA_HOME": str(home.parents[1])})
    assert (found.nvcc, found.version) == (home, (13, 0))
    assert find_toolkit({"PATH": path}) == Toolkit(on_path, (12, 9))
    found = find_toolkit(nowhere(tmp_path))
    assert (found.nvcc, found.version) == (wheels, (13, 1))
    assert found.library_flags == [f"-L{wheels.parents[1] / 'lib'}"]
    assert Toolkit(home, (13, 0)).library_flags == []


def test_an_old_toolkit_is_refused(tmp_path: Path) -> None:
    nvcc = toolkit_at(tmp_path, "12.4")
    with pytest.raises(BuildError, match=f"needs CUDA 12.8 or newer, {nvcc} is 12.4"):
        find_toolkit({"CUDA_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("90a;120a", ["90a", "120a"]),
        ("sm_120a, 90a 90a", ["90a", "120a"]),
        ("120f", ["120f"]),
        ("100", ["100"]),
    ],
)
def test_targets(text: str, archs: list[str]) -> None:
    assert parse_archs(text) == archs


@pytest.mark.parametrize("text", ["89", "sm90", "90b", "compute_90a", ";"])
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(BuildError, match="LONGLEAF_CUDA_ARCHS"):
        parse_archs(text)


def test_a_command_has_one_code_target_for_each_and_knows_its_own(tmp_path: Path) -> None:
    command = cuda_build.compile_command(Toolkit(tmp_path, (13, 0)), ["90a", "120a"], ["-G"])
    assert "-gencode=arch=compute_90a,code=sm_90a" in command
    assert "-gencode=arch=compute_120a,code=sm_120a" in command
    assert '-DLONGLEAF_CUDA_ARCHS="90a;120a"' in command
    assert command[-1] == "-G"


def test_every_unit_of_the_sources_is_built() -> None:
    names = {source.name for source in cuda_build.sources()}
    assert {"capi.cu", "tree_capi.cu", "compact_capi.cu"} <= names
    every = {path.name for path in (cuda_build.ROOT / "csrc").rglob("*.cu")}
    assert names == every


def test_the_package_imports_nothing_of_the_service() -> None:
    imported: set[str] = set()
    for path in (cuda_build.ROOT / "longleaf_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
    assert "longleaf_kernels._library" in imported
    assert not {name for name in imported if name.split(".")[0] == "longleaf"}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_unit_is_compiled_again_only_when_what_it_reads_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """g++ takes nvcc's place: the dependency file has the same form."""
    monkeypatch.setattr(cuda_build, "ROOT", tmp_path)
    header, source = tmp_path / "value.h", tmp_path / "unit.cpp"
    header.write_text("#define VALUE 1\n")
    source.write_text('#include "value.h"\nextern "C" int value() { return VALUE; }\n')
    unit = Unit(source, tmp_path)
    command = ["g++", "-c", "-fPIC"]
    unit.compile(command)
    first = unit.object.stat().st_mtime_ns
    os.utime(header)
    unit.compile(command)
    assert unit.object.stat().st_mtime_ns == first
    header.write_text("#define VALUE 2\n")
    unit.compile(command)
    second = unit.object.stat().st_mtime_ns
    assert second > first
    unit.compile([*command, "-O1"])
    assert unit.object.stat().st_mtime_ns > second
    header.unlink()
    with pytest.raises(BuildError, match=r"nvcc failed on unit.cpp:\n[^$]*value.h"):
        unit.compile(command)
    assert not unit.object.with_suffix(".key").exists()
