"""The build's and the loader's messages, and what a rebuild compiles. Needs neither nvcc nor torch;
a script stands for nvcc where one must run."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
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
    ],
)
def test_targets(text: str, archs: list[str]) -> None:
    assert parse_archs(text) == archs


@pytest.mark.parametrize("text", ["89a", "sm90", "90b", "100", "120", "９０a", "compute_90a", ";"])
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


STAND_IN = """\
#!/bin/sh
if [ "$1" = --version ]; then echo "release 13.5, V{release}"; exit 0; fi
while [ $# -gt 0 ]; do
  case "$1" in -o) output="$2" ;; -MF) depends="$2" ;; esac
  last="$1"; shift
done
echo "$last" > "$output"
if [ -n "$depends" ]; then
  echo "$output: $last" > "$depends"
  echo "ptxas info    : Compiling entry function '_Z4walkIfEvi' for 'sm_120a'"
  echo "    8 bytes stack frame, {stored} bytes spill stores, {stored} bytes spill loads"
fi
"""


def stand_in(root: Path, release: str = "13.5.37", stored: int = 0) -> Mapping[str, str]:
    """A toolkit whose nvcc writes files of the right names; the environment that chooses it."""
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(STAND_IN.format(release=release, stored=stored))
    nvcc.chmod(0o755)
    return {"CUDA_HOME": str(root), "PATH": "/usr/bin:/bin", "NVCC_CCBIN": "sh"}


def test_a_build_warns_of_every_spill_and_names_the_compiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "lib" / "kernels.so"
    cuda_build.build(output, tmp_path / "build", stand_in(tmp_path / "good"))
    assert capsys.readouterr().err == ""
    assert [path.name for path in output.parent.iterdir()] == ["kernels.so"]
    spilling = stand_in(tmp_path / "spilling", stored=90)
    for _ in range(2):  # a build that compiles nothing warns too
        units = cuda_build.build(output, tmp_path / "build", spilling)
        warning = capsys.readouterr().err
        assert "nvcc 13.5.37 spills registers" in warning
        assert warning.count("sm_120a") == len(units)
        assert re.search(r"sm_120a (walk<float>|_Z4walkIfEvi): 180 bytes\n", warning)
        assert "requirements-cuda.txt" in warning


def test_builds_that_differ_do_not_share_files(tmp_path: Path) -> None:
    output, directory = tmp_path / "kernels.so", tmp_path / "build"
    environ = stand_in(tmp_path / "home")
    first = cuda_build.build(output, directory, environ)
    flags = cuda_build.build(output, directory, {**environ, "LONGLEAF_NVCC_FLAGS": "-G"})
    newer = cuda_build.build(output, directory, stand_in(tmp_path / "home", "13.5.38"))
    again = cuda_build.build(output, directory, stand_in(tmp_path / "home"))
    assert len({units[0].directory for units in (first, flags, newer, again)}) == 3
    assert first == again


def test_builds_at_once_leave_a_whole_library(tmp_path: Path) -> None:
    output, environ = tmp_path / "kernels.so", stand_in(tmp_path / "home")
    with ThreadPoolExecutor(4) as pool:
        built = [
            pool.submit(cuda_build.build, output, tmp_path / "build", environ) for _ in range(4)
        ]
        for future in built:
            future.result()
    assert output.read_text().strip().endswith(".o")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build", "home", "kernels.so"]


def test_files_that_cannot_be_used_are_named_without_a_traceback(tmp_path: Path) -> None:
    environ = stand_in(tmp_path / "home")
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"cannot build in .*/file/build: .*: Not a directory"):
        cuda_build.build(tmp_path / "kernels.so", tmp_path / "file" / "build", environ)
    with pytest.raises(BuildError, match=r"cannot build in .*/file: Not a directory|File exists"):
        cuda_build.build(tmp_path / "file" / "kernels.so", tmp_path / "build", environ)
    (tmp_path / "home" / "bin" / "nvcc").chmod(0o644)
    with pytest.raises(BuildError, match=r"cannot run .*/bin/nvcc: Permission denied"):
        cuda_build.build(tmp_path / "kernels.so", tmp_path / "build", environ)


def test_the_message_names_the_pinned_release() -> None:
    pinned = (cuda_build.ROOT.parent / "requirements-cuda.txt").read_text()
    for wheel in cuda_build.WHEELS.split():
        assert f"{wheel} " in pinned
