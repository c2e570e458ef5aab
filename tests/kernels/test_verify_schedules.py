"""The verify kernel's device code on the CPU: right, and never stuck, whatever waits for whatever.

Warps are held up and copies delayed at random, which on a GPU shows a race or a deadlock once in
thousands of launches.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "schedules"
INCLUDE = Path(__file__).parents[2] / "kernels" / "csrc" / "include"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel with an emulated GPU around it."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the kernel for the CPU")
    output = tmp_path_factory.mktemp("schedules") / "verify"
    command = [
        *("g++", "-std=c++17", "-O2", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
        *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-clobbered", "-Wno-psabi"),
        *(f"-I{SOURCES}", f"-I{INCLUDE}", "-include", "cuda_runtime.h"),
        *("-x", "c++", str(SOURCES / "verify.cpp"), str(SOURCES / "emulator.cpp")),
        *("-o", str(output)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


def run(program: Path, *arguments: str) -> str:
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("first", range(1, 61, 4))
def test_random_cases_under_random_schedules(program: Path, first: int) -> None:
    assert "4 cases, 0 wrong" in run(program, str(first), "4")


@pytest.mark.parametrize("what", ["poison", "nodes", "lengths"])
def test_cases_that_chance_does_not_bring(program: Path, what: str) -> None:
    assert ", 0 wrong" in run(program, what)
