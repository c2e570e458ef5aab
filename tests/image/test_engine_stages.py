"""The Dockerfile's target `engine` as far as a machine without GPU and CUDA's images goes.

Its commands are taken from the Dockerfile and run as they stand: on the pinned nvcc, and in the
environment that `make test-engine` makes of the pinned SGLang.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.image.test_dockerfile import PIN, ROOT, TEXT

PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1")
"""As pip prefers them."""


def _commands(stage: str) -> list[str]:
    """Shell of a stage's RUN instructions."""
    text = TEXT.partition(f" AS {stage}\n")[2].partition("\nFROM ")[0].replace("\\\n", " ")
    return [line.removeprefix("RUN ") for line in text.splitlines() if line.startswith("RUN ")]


def _place(name: str) -> str:
    found = os.environ.get(name)
    if found is None:
        pytest.skip(f"needs {name}: make test-image sets it")
    return found


@pytest.mark.parametrize("name", ["ops/gpu/payload.txt", "requirements-image.txt"])
def test_the_wheels_named_exist(name: str, tmp_path: Path) -> None:
    """For Python 3.12 on x86-64 there is each wheel, and its hash is the one that is pinned."""
    _place("LONGLEAF_CUDA_HOME")
    lines = (ROOT / name).read_text().splitlines()
    names = [line.rstrip(" \\") for line in lines if PIN.match(line)]
    # Without hashes pip asks for metadata alone, and downloads nothing.
    (tmp_path / "names.txt").write_text("\n".join(names))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
            *("--disable-pip-version-check", "--no-deps", "--only-binary=:all:"),
            *("--python-version", "3.12", "--implementation", "cp", "--target", tmp_path / "x"),
            *(word for one in PLATFORMS for word in ("--platform", f"{one}_x86_64")),
            *("--report", tmp_path / "report.json", "-r", tmp_path / "names.txt"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())["install"]
    assert len(report) == len(names) > 40
    pinned = {line.partition("sha256:")[2].rstrip(" \\") for line in lines if "--hash" in line}
    found = {one["download_info"]["archive_info"]["hashes"]["sha256"] for one in report}
    assert found == pinned


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stage `kernels`: its context without what .dockerignore leaves out, and its command."""
    cuda = _place("LONGLEAF_CUDA_HOME")
    kernels = tmp_path_factory.mktemp("src") / "kernels"
    left_out = shutil.ignore_patterns("build", "lib", "__pycache__")
    shutil.copytree(ROOT / "kernels", kernels, ignore=left_out)
    (command,) = _commands("kernels")
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=kernels,
        env={"PATH": os.environ["PATH"], "CUDA_HOME": cuda},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return kernels


def test_the_kernels_are_built_for_both_generations(built: Path) -> None:
    library = built / "longleaf_kernels" / "lib" / "liblongleaf_kernels.so"
    listed = subprocess.run(
        [Path(_place("LONGLEAF_CUDA_HOME"), "bin", "cuobjdump"), "--list-elf", library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert {"sm_90a", "sm_120a"} == {line.split(".")[-2] for line in listed.splitlines()}


def _check(built: Path, tmp_path: Path, version: str) -> subprocess.CompletedProcess[str]:
    """The stage `engine`'s last command, on the library that was built."""
    *_, command = _commands("engine")
    assert command.startswith("python3 -c")
    for name, metadata in {
        "longleaf-0.1.0": "Name: longleaf\nVersion: 0.1.0\n",
        f"sglang-{version}": f"Name: sglang\nVersion: {version}\n",
    }.items():
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\n{metadata}")
    (tmp_path / "longleaf-0.1.0.dist-info" / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nlongleaf = longleaf.engine.plugin:register\n"
    )
    paths = (tmp_path, built, ROOT / "service")
    python = Path(_place("LONGLEAF_ENGINE_PYTHON"))
    return subprocess.run(
        ["sh", "-c", command],
        env={
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_base_with_another_torch_fails_the_build() -> None:
    """The pinned torch of the CPU tests is not the engine's."""
    (step,) = (one for one in _commands("engine") if "check_platform" in one)
    command = step.partition(" && ")[2]
    python = Path(_place("LONGLEAF_ENGINE_PYTHON"))
    done = subprocess.run(
        ["sh", "-c", command],
        env={
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "service"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "the engine needs torch 2.11, found 2.13.0" in done.stderr


def test_the_build_checks_that_the_patches_fit(built: Path, tmp_path: Path) -> None:
    done = _check(built, tmp_path, "0.5.17")
    assert done.returncode == 0, done.stderr


def test_another_sglang_fails_the_build(built: Path, tmp_path: Path) -> None:
    done = _check(built, tmp_path, "0.5.18")
    assert done.returncode != 0
    assert "written against SGLang 0.5.17, found 0.5.18" in done.stderr


def test_a_source_that_differs_fails_the_build(built: Path, tmp_path: Path) -> None:
    """One file that the patches rely on, with a line more, in front of SGLang's own."""
    python = _place("LONGLEAF_ENGINE_PYTHON")
    where = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
    done = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    package = Path(done.stdout.strip())
    altered = tmp_path / "sglang"
    shutil.copytree(package, altered, copy_function=os.symlink)
    changed = altered / "launch_server.py"
    text = changed.read_text()
    changed.unlink()
    changed.write_text(text + "\n# changed\n")
    done = _check(built, tmp_path, "0.5.17")
    assert done.returncode != 0
    assert "sglang.launch_server differs from SGLang 0.5.17's" in done.stderr


def test_kernels_of_another_commit_fail_the_build(built: Path, tmp_path: Path) -> None:
    (tmp_path / "longleaf_kernels").mkdir()
    for name in ("__init__.py", "_library.py"):
        shutil.copy(built / "longleaf_kernels" / name, tmp_path / "longleaf_kernels")
    done = _check(built, tmp_path, "0.5.17")
    assert done.returncode != 0
    assert "make kernels" in done.stderr or "longleaf_kernels" in done.stderr
