"""Assemble SGLang for a GPU host that cannot fetch packages: pinned wheels, stripped and packed.

The host has Python 3.12, torch 2.11 (CUDA 13.0), triton 3.6, transformers 5.17, nvcc and the usual
scientific packages. ``python -m ops.gpu.payload`` writes build/gpu-payload/site.tar.xz.
"""

import fnmatch
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
OUTPUT = REPOSITORY / "build/gpu-payload"
WORK = REPOSITORY / "build/gpu-wheels"
LOCK = HERE / "payload.txt"
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 27, 26, 24, 17, 5)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)

UNUSED = (
    # Models and tools that no server of these tests loads.
    "sglang/multimodal_gen/*",
    "sglang/eval/*",
    "sglang/srt/server/*",
    "sglang/srt/grpc/*.so",
    "sglang/srt/multimodal/*.so",
    "sglang/srt/hardware_backend/mlx/*",
    # Sources of kernels that flashinfer would compile: nothing on this path asks for them.
    "flashinfer/data/cutlass/*",
    "flashinfer/data/cccl/*",
    "flashinfer/data/spdlog/*",
    # Kernels for other GPUs, other CUDA versions, other interpreters.
    "sgl_kernel/sm100/*",
    "sgl_kernel/testing/*",
    "torch_memory_saver_hook_mode_*_cu12.abi3.so",
    "torchao/_C_*.so",
    "tvm_ffi/3rdparty/libbacktrace/*",
    "compressed_tensors/transform/utils/hadamards.safetensors",
    "*.pkl",
    "zstandard/_cffi*.so",
    "torchao/*/tests/*",
    "tests/*",
    "tools/*",
    "triton_kernels/*",
    "build_backend.py",
    "build_utils.py",
)
"""Files left out, as patterns of whole paths."""

KERNEL_LIBRARY = "sgl_kernel/sm90/common_ops*"
"""The one library of sgl_kernel that an sm_90 host loads."""

STUBS = {
    "IPython/__init__.py": "",
    "IPython/display.py": (
        "def HTML(*values, **options):\n    return values\n\n\n"
        "def display(*values, **options):\n    pass\n"
    ),
    "soundfile.py": "class SoundFile:\n    pass\n",
}
"""Packages that are imported on this path and never called."""


def wanted(name: str) -> bool:
    """Whether a wheel's file goes into the payload."""
    if name.startswith("sgl_kernel/") and name.endswith(".so"):
        return fnmatch.fnmatch(name, KERNEL_LIBRARY)
    return not name.endswith("/") and not any(fnmatch.fnmatch(name, p) for p in UNUSED)


def download(wheels: Path) -> list[Path]:
    """Fetch the locked wheels that are not there yet, and return all of them."""
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(LOCK)]
    command += ["--python-version", "3.12", "--implementation", "cp", "--dest", str(wheels)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run(command, check=True)
    names = {
        line.split("==")[0].strip().replace("-", "_"): line.split("==")[1].split()[0]
        for line in LOCK.read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    found = [
        wheel
        for wheel in sorted(wheels.glob("*.whl"))
        if names.get(wheel.name.split("-")[0].lower()) == wheel.name.split("-")[1]
    ]
    if len(found) != len(names):
        raise RuntimeError(f"{LOCK.name} locks {len(names)} wheels, {wheels} holds {len(found)}")
    return found


def unpack(wheels: list[Path], site: Path) -> None:
    """Write the wanted files of all wheels, repaired and stubbed, into an empty folder."""
    shutil.rmtree(site, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(wanted, archive.namelist()):
                archive.extract(name, site)
    for name, text in STUBS.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    _repair(site)


def _repair(site: Path) -> None:
    """transformers 5.17 registers this model type itself, and refuses a second registration."""
    path = site / "sglang/srt/configs/qwen3_asr.py"
    text = path.read_text()
    needle = 'AutoConfig.register("qwen3_asr", Qwen3ASRConfig)'
    if text.count(needle) != 1:
        raise RuntimeError(f"{path} is not the file that this repair was written for")
    path.write_text(text.replace(needle, needle[:-1] + ", exist_ok=True)"))


def pack(site: Path, archive: Path) -> None:
    """Write the folder as a tar.xz whose bytes depend on its contents alone."""
    part = archive.with_suffix(".part")
    with (
        lzma.open(part, "wb", preset=6) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in _files(site):
            info = tarfile.TarInfo(str(path.relative_to(site)))
            data = path.read_bytes()
            info.size, info.mode = len(data), 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(info, io.BytesIO(data))
    part.replace(archive)


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.is_file())


@click.command()
def main() -> None:
    """Write build/gpu-payload/site.tar.xz."""
    site = WORK / "site"
    OUTPUT.mkdir(parents=True, exist_ok=True)
    unpack(download(WORK), site)
    pack(site, OUTPUT / "site.tar.xz")
    unpacked = sum(path.stat().st_size for path in _files(site))
    packed = (OUTPUT / "site.tar.xz").stat().st_size
    shutil.rmtree(site)
    click.echo(
        f"{OUTPUT / 'site.tar.xz'}: {packed / 2**20:.1f} MiB, {unpacked / 2**20:.1f} unpacked"
    )


if __name__ == "__main__":
    main()
