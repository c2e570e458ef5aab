"""Compile csrc/ with nvcc into one shared library with a plain C ABI. Needs no torch.

python kernels/cuda_build.py builds in place; `pip install ./kernels` calls the same functions.

Environment: CUDA_HOME (the toolkit), LONGLEAF_CUDA_ARCHS (default "90a;120a"),
LONGLEAF_NVCC_FLAGS (appended to every compile command), NVCC_CCBIN (the host compiler).
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LIBRARY = Path("longleaf_kernels/lib/liblongleaf_kernels.so")
DEFAULT_ARCHS = "90a;120a"
OLDEST_CUDA = (12, 8)
"""The first toolkit that knows sm_120a."""
WHEELS = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"


class BuildError(RuntimeError):
    """The library cannot be built here; the message says what to do."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA compiler. nvcc: its path; version: (major, minor)."""

    nvcc: Path
    version: tuple[int, int]

    @property
    def library_flags(self) -> list[str]:
        """Return where the static runtime is, for toolkits that nvcc.profile misdescribes.

        The PyPI wheels keep libraries in lib/, while nvcc looks in lib64/.
        """
        directory = self.nvcc.resolve().parent.parent / "lib"
        return [f"-L{directory}"] if (directory / "libcudart_static.a").exists() else []


def find_toolkit(environ: Mapping[str, str]) -> Toolkit:
    """Return the toolkit of CUDA_HOME, PATH, /usr/local/cuda or the PyPI wheels, in that order."""
    nvcc = _find_nvcc(environ)
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if done.returncode or found is None:
        raise BuildError(f"{nvcc} --version failed: {(done.stderr or done.stdout).strip()}")
    version = int(found[1]), int(found[2])
    if version < OLDEST_CUDA:
        raise BuildError(
            f"longleaf_kernels needs CUDA {OLDEST_CUDA[0]}.{OLDEST_CUDA[1]} or newer, "
            f"{nvcc} is {version[0]}.{version[1]}"
        )
    return Toolkit(nvcc, version)


def _find_nvcc(environ: Mapping[str, str]) -> Path:
    home = environ.get("CUDA_HOME")
    if home:
        nvcc = Path(home, "bin", "nvcc")
        if not nvcc.is_file():
            raise BuildError(f"CUDA_HOME is {home}, which has no bin/nvcc")
        return nvcc
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    candidates = [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    candidates += sorted(Path(entry, "nvidia/cu13/bin/nvcc") for entry in sys.path if entry)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise BuildError(
        "longleaf_kernels is compiled with nvcc, and there is none on PATH, in CUDA_HOME or in "
        "/usr/local/cuda. Install the CUDA toolkit 12.8 or newer and set CUDA_HOME to it, or "
        f"`pip install {WHEELS}` and set CUDA_HOME to that environment's "
        "site-packages/nvidia/cu13. No GPU is needed to build."
    )


def parse_archs(text: str) -> list[str]:
    """Return the targets in `text`, such as "90a;120a", ascending and each once."""
    archs = {arch.removeprefix("sm_") for arch in re.split(r"[;, ]+", text.strip()) if arch}
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}[af]?", arch) or int(arch.rstrip("af")) < 90:
            raise BuildError(
                f"LONGLEAF_CUDA_ARCHS takes targets from 90 on such as 90a;120a, got {arch!r}"
            )
    if not archs:
        raise BuildError("LONGLEAF_CUDA_ARCHS names no target; leave it unset for 90a;120a")
    return sorted(archs, key=lambda arch: (int(arch.rstrip("af")), arch))


def sources(root: Path = ROOT) -> list[Path]:
    """Return every translation unit: csrc/*.cu and csrc/instances/*.cu."""
    return sorted([*root.glob("csrc/*.cu"), *root.glob("csrc/instances/*.cu")])


def compile_command(toolkit: Toolkit, archs: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the command that compiles one unit, without its input and outputs."""
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [
        *(str(toolkit.nvcc), "-c", "-std=c++17", "-O3", "--expt-relaxed-constexpr"),
        *("-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra", "-Xptxas=-v"),
        *(f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'include'}"),
        f'-DLONGLEAF_CUDA_ARCHS="{";".join(archs)}"',
        *targets,
        *flags,
    ]


@dataclass(frozen=True)
class Unit:
    """One translation unit and where its products go, all in one directory."""

    source: Path
    directory: Path

    @property
    def object(self) -> Path:
        """Return the object file."""
        return self.directory / f"{self.source.stem}.o"

    @property
    def log(self) -> Path:
        """Return what ptxas said: registers, spills, shared memory of each kernel."""
        return self.object.with_suffix(".log")

    def compile(self, command: Sequence[str]) -> None:
        """Compile unless the object holds exactly what these sources and command give."""
        stamp, depends = self.object.with_suffix(".key"), self.object.with_suffix(".d")
        if self.object.exists() and stamp.exists() and stamp.read_text() == self._key(command):
            return
        stamp.unlink(missing_ok=True)
        products = ["-MD", "-MF", str(depends), "-o", str(self.object), str(self.source)]
        done = subprocess.run(
            [*command, *products], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            raise BuildError(f"nvcc failed on {self.source.name}:\n{done.stdout}")
        self.log.write_text(done.stdout)
        stamp.write_text(self._key(command))

    def _key(self, command: Sequence[str]) -> str:
        digest = hashlib.sha256(shlex.join(command).encode())
        for path in self._dependencies():
            digest.update(path.read_bytes() if path.exists() else b"gone")
        return digest.hexdigest()

    def _dependencies(self) -> list[Path]:
        """Return the source and the project's headers that it includes."""
        depends = self.object.with_suffix(".d")
        if not depends.exists():
            return [self.source]
        words = depends.read_text().replace("\\\n", " ").split()[1:]
        paths = {Path(word).resolve() for word in words if word.startswith("/")}
        return sorted(path for path in paths if path.is_relative_to(ROOT))


def build(
    output: Path,
    build_dir: Path,
    environ: Mapping[str, str],
    jobs: int | None = None,
) -> list[Unit]:
    """Compile every unit, link them into `output`, and return the units."""
    toolkit = find_toolkit(environ)
    if shutil.which(environ.get("NVCC_CCBIN", "g++"), path=environ.get("PATH")) is None:
        raise BuildError("nvcc needs a host compiler: install g++ or set NVCC_CCBIN to one")
    archs = parse_archs(environ.get("LONGLEAF_CUDA_ARCHS", DEFAULT_ARCHS))
    flags = shlex.split(environ.get("LONGLEAF_NVCC_FLAGS", ""))
    command = compile_command(toolkit, archs, flags)
    build_dir.mkdir(parents=True, exist_ok=True)
    units = [Unit(source, build_dir) for source in sources()]
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        list(pool.map(lambda unit: unit.compile(command), units))
    output.parent.mkdir(parents=True, exist_ok=True)
    link = [str(toolkit.nvcc), "-shared", "-cudart=static", *toolkit.library_flags]
    link += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    link += ["-Xlinker=--exclude-libs,ALL", "-o", str(output), *(str(u.object) for u in units)]
    done = subprocess.run(link, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BuildError(f"linking {output.name} failed:\n{done.stdout}")
    return units


def main() -> None:
    """Build in place, or where the arguments say."""
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels of longleaf_kernels.")
    parser.add_argument("--output", type=Path, default=ROOT / LIBRARY)
    parser.add_argument("--build-dir", type=Path, default=ROOT.parent / "build" / "kernels")
    parser.add_argument("--jobs", type=int, default=None)
    arguments = parser.parse_args()
    try:
        units = build(arguments.output, arguments.build_dir, os.environ, arguments.jobs)
    except BuildError as error:
        sys.exit(f"error: {error}")
    print(f"{arguments.output}: {len(units)} units, {arguments.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
