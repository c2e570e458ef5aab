import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
EMULATOR = Path(__file__).parent / "emulator"


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library's kernels without inline PTX, compiled for the CPU."""
    return _compiled(tmp_path_factory.getbasetemp())


@cache
def _compiled(folder: Path) -> Path:
    """Compile once a run, however many modules import the fixture."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the kernels for the CPU")
    output = folder / "liblongleaf_kernels.so"
    units = [KERNELS / "csrc" / f"{name}.cu" for name in ("capi", "tree_capi", "compact_capi")]
    includes = (EMULATOR, KERNELS / "csrc", KERNELS / "csrc" / "include")
    command = [
        *("g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-fno-strict-aliasing"),
        *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-clobbered"),
        *('-DLONGLEAF_CUDA_ARCHS="emulated"', "-U_FORTIFY_SOURCE"),
        *(f"-I{directory}" for directory in includes),
        *("-x", "c++", *map(str, units), str(EMULATOR / "emulator.cpp"), "-o", str(output)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output
