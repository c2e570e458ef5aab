"""Compile csrc/ with nvcc into one shared library with a plain C ABI. Needs no torch.

python kernels/cuda_build.py builds in place; `pip install ./kernels` calls the same functions.

Environment: CUDA_HOME (the toolkit), LONGLEAF_CUDA_ARCHS (default "90a;120a"),
LONGLEAF_NVCC_FLAGS (appended to every compile command), NVCC_CCBIN (the host compiler).
"""

import argparse
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LIBRARY = Path("longleaf_kernels/lib/liblongleaf_kernels.so")
DEFAULT_ARCHS = "90a;120a"
OLDEST_CUDA = (12, 8)
"""The first toolkit that knows sm_120a."""
WHEELS = (
    "nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 "
    "nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"
)
"""The release that resources.json is of, as in requirements-cuda.txt."""


class BuildError(RuntimeError):
    """The library cannot be built here; the message says what to do."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA compiler. nvcc: its path; version: (major, minor); release: all it says of itself."""

    nvcc: Path
    version: tuple[int, int]
    release: str = field(default="", compare=False)

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
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"cannot run {nvcc}: {error.strerror}") from error
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if done.returncode or found is None:
        raise BuildError(f"{nvcc} --version failed: {(done.stderr or done.stdout).strip()}")
    version = int(found[1]), int(found[2])
    if version < OLDEST_CUDA:
        raise BuildError(
            f"longleaf_kernels needs CUDA {OLDEST_CUDA[0]}.{OLDEST_CUDA[1]} or newer, "
            f"{nvcc} is {version[0]}.{version[1]}"
        )
    exact = re.search(r"\bV(\d[\d.]*)", done.stdout)
    return Toolkit(nvcc, version, exact[1] if exact else f"{version[0]}.{version[1]}")


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
        # The suffix: registers change hands between warps, which plain targets do not have.
        if not re.fullmatch(r"[0-9]{2,3}[af]", arch) or int(arch[:-1]) < 90:
            raise BuildError(
                "LONGLEAF_CUDA_ARCHS takes targets from 90 on with their suffix a or f, such as "
                f"90a;120a, got {arch!r}"
            )
    if not archs:
        raise BuildError("LONGLEAF_CUDA_ARCHS names no target; leave it unset for 90a;120a")
    return sorted(archs, key=lambda arch: (int(arch[:-1]), arch))


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
    compiler: str = ""  # its release

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
        digest = hashlib.sha256(f"{self.compiler} {shlex.join(command)}".encode())
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


@dataclass(frozen=True)
class Spill:
    """A kernel that the compiler could not keep in registers. size: bytes stored and loaded."""

    target: str
    kernel: str
    size: int


def parse_spills(log: str) -> Iterator[Spill]:
    """Yield what spills, from what `ptxas -v` printed; names stay mangled."""
    name = ("", "")
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for '(sm_\w+)'", line):
            name = entry[2], entry[1]
        found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if found and (size := int(found[1]) + int(found[2])):
            yield Spill(*name, size)


def spill_warning(units: Sequence["Unit"], toolkit: Toolkit) -> str | None:
    """Return what to tell the user of kernels that spill, None if none does."""
    spills = [spill for unit in units for spill in parse_spills(unit.log.read_text())]
    if not spills:
        return None
    names = [spill.kernel for spill in spills]
    filt = shutil.which("c++filt")
    if filt is not None:
        done = subprocess.run([filt, *names], capture_output=True, text=True, check=False)
        names = done.stdout.splitlines() if done.returncode == 0 else names
    lines = [
        f"  {spill.target} {name.split('(')[0].removeprefix('void ')}: {spill.size} bytes"
        for spill, name in zip(spills, names, strict=True)
    ]
    return (
        f"warning: nvcc {toolkit.release} spills registers, which makes these kernels slower:\n"
        + "\n".join(lines)
        + "\nThe release pinned in requirements-cuda.txt does not spill."
    )


def build(
    output: Path,
    build_dir: Path,
    environ: Mapping[str, str],
    jobs: int | None = None,
) -> list[Unit]:
    """Compile every unit, link them into `output`, warn of spills, and return the units."""
    try:
        return _build(output, build_dir, environ, jobs)
    except OSError as error:
        where = error.filename or build_dir
        raise BuildError(f"cannot build in {build_dir}: {where}: {error.strerror}") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let one build at a time use a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(
    output: Path, build_dir: Path, environ: Mapping[str, str], jobs: int | None
) -> list[Unit]:
    toolkit = find_toolkit(environ)
    if shutil.which(environ.get("NVCC_CCBIN", "g++"), path=environ.get("PATH")) is None:
        raise BuildError("nvcc needs a host compiler: install g++ or set NVCC_CCBIN to one")
    archs = parse_archs(environ.get("LONGLEAF_CUDA_ARCHS", DEFAULT_ARCHS))
    flags = shlex.split(environ.get("LONGLEAF_NVCC_FLAGS", ""))
    command = compile_command(toolkit, archs, flags)
    # Other commands and compilers have directories of their own, so that they can run beside this.
    identity = hashlib.sha256(f"{toolkit.release} {shlex.join(command)}".encode()).hexdigest()
    directory = build_dir / identity[:12]
    units = [Unit(source, directory, toolkit.release) for source in sources()]
    output.parent.mkdir(parents=True, exist_ok=True)
    # Replaced at once: a process that has the old library loaded keeps it.
    linked = output.with_name(f".{output.name}.{identity[:12]}.{os.getpid()}")
    link = [str(toolkit.nvcc), "-shared", "-cudart=static", *toolkit.library_flags]
    link += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    link += ["-Xlinker=--exclude-libs,ALL", "-o", str(linked), *(str(u.object) for u in units)]
    with _locked(directory):
        with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
            list(pool.map(lambda unit: unit.compile(command), units))
        try:
            done = subprocess.run(link, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise BuildError(f"linking {output.name} failed:\n{done.stdout}")
            os.replace(linked, output)
        finally:
            linked.unlink(missing_ok=True)
        warning = spill_warning(units, toolkit)
    if warning:
        print(warning, file=sys.stderr)
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
