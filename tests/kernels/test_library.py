"""Finding and loading the compiled library."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: make test-torch")

from longleaf_kernels import _tree, accept, compact, verify
from longleaf_kernels._library import (
    ABI_VERSION,
    PATH_VARIABLE,
    KernelLibraryError,
    Library,
    library_path,
)

pytestmark = pytest.mark.torch
HEADERS = Path(__file__).parents[2] / "kernels" / "csrc"


def compiled(directory: Path, source: str) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    output = directory / "library.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", f"-I{HEADERS}", "-x", "c++", "-", "-o", str(output)],
        input=source,
        text=True,
        check=True,
    )
    return output


def library_for(directory: Path, archs: str, version: int = ABI_VERSION) -> Path:
    return compiled(
        directory,
        f"""extern "C" int longleaf_abi_version() {{ return {version}; }}
        extern "C" const char* longleaf_cuda_archs() {{ return "{archs}"; }}
        extern "C" const char* longleaf_error_string(int) {{ return "out of memory"; }}""",
    )


def test_a_package_without_its_library_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "none.so"))
    with pytest.raises(KernelLibraryError) as refusal:
        library_path()
    for part in (
        PATH_VARIABLE,
        str(tmp_path / "none.so"),
        "pip install ./kernels",
        "no GPU needed",
    ):
        assert part in str(refusal.value)


def test_the_variable_chooses_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tmp_path / "mine.so"
    chosen.touch()
    monkeypatch.setenv(PATH_VARIABLE, str(chosen))
    assert library_path() == chosen


def test_files_that_are_no_such_library(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(KernelLibraryError, match=f"cannot load {text}"):
        Library(text)
    other = compiled(tmp_path, "int unrelated;")
    with pytest.raises(KernelLibraryError, match="is not a longleaf_kernels library"):
        Library(other)


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    path = library_for(tmp_path, "90a", version=ABI_VERSION + 1)
    message = f"has ABI version {ABI_VERSION + 1}, this package needs {ABI_VERSION}: rebuild"
    with pytest.raises(KernelLibraryError, match=message):
        Library(path)


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("90a;120a", (9, 0), True),
        ("90a;120a", (12, 0), True),
        ("90a;120a", (12, 1), False),
        ("90a;120a", (10, 0), False),
        ("120f", (12, 1), True),
        ("120f", (10, 3), False),
        ("100", (10, 3), True),
        ("103", (10, 0), False),
    ],
)
def test_a_gpu_without_code_in_the_library_is_refused(
    tmp_path: Path, archs: str, capability: tuple[int, int], runs: bool
) -> None:
    library = Library(library_for(tmp_path, archs))
    if runs:
        library.check_device(capability)
        return
    major, minor = capability
    with pytest.raises(KernelLibraryError) as refusal:
        library.check_device(capability)
    assert f"this GPU is sm_{major}{minor}" in str(refusal.value)
    assert f'LONGLEAF_CUDA_ARCHS="{major}{minor}a"' in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("longleaf_verify_mla_args", verify._Arguments),
        ("longleaf_tree_output", _tree._TreeOutput),
        ("longleaf_build_tree_args", _tree._BuildTreeArgs),
        ("longleaf_expand_tree_args", _tree._ExpandTreeArgs),
        ("longleaf_walk", accept._Walk),
        ("longleaf_accept_sampled_args", accept._AcceptSampledArgs),
        ("longleaf_compact_kv_args", compact._CompactArgs),
    ],
)
def test_structures_lie_as_the_headers_say(
    tmp_path: Path, name: str, structure: type[ctypes.Structure]
) -> None:
    fields = [field for field, *_ in structure._fields_]
    offsets = ", ".join(f"offsetof(struct {name}, {field})" for field in fields)
    includes = "".join(f'#include "{header.name}"\n' for header in sorted(HEADERS.glob("*.h")))
    library = compiled(
        tmp_path,
        f'#include <cstddef>\n{includes}extern "C" const size_t layout[] = {{\n'
        f"{offsets}, sizeof(struct {name})}};",
    )
    layout = (ctypes.c_size_t * (len(fields) + 1)).in_dll(ctypes.CDLL(str(library)), "layout")
    expected = [getattr(structure, field).offset for field in fields]
    assert list(layout) == [*expected, ctypes.sizeof(structure)]
