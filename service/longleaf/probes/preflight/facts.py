"""What there is: GPUs, driver, shared memory, files. Reading only."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

QUERY = "index,name,compute_cap,memory.total,memory.free,driver_version"
_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. capability: major and minor; memory in bytes, None where the driver tells none."""

    index: int
    name: str
    capability: tuple[int, int] | None
    memory_total: int | None
    memory_free: int | None
    driver: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found.

    gpu_error: why the GPUs could not be listed; shared_memory: size of /dev/shm in bytes, None
    where there is none.
    """

    gpus: tuple[Gpu, ...]
    gpu_error: str | None
    shared_memory: int | None


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Read nvidia-smi's CSV without header and units; raises ValueError for another text."""
    return tuple(_parse_gpu(line) for line in text.splitlines() if line.strip())


def _parse_gpu(line: str) -> Gpu:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 6 or not fields[0].isdigit():
        raise ValueError(f"nvidia-smi said {line.strip()!r}")
    major, _, minor = fields[2].partition(".")
    capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    return Gpu(
        int(fields[0]),
        fields[1],
        capability,
        _mebibytes(fields[3]),
        _mebibytes(fields[4]),
        fields[5],
    )


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None


def collect(nvidia_smi: Sequence[str] = ("nvidia-smi",), shm: Path = Path("/dev/shm")) -> Facts:
    """Ask the driver and the file system."""
    gpus, why = _list_gpus([*nvidia_smi, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"])
    return Facts(gpus, why, _file_system_size(shm))


def _list_gpus(command: list[str]) -> tuple[tuple[Gpu, ...], str | None]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except FileNotFoundError:
        return (), f"{command[0]} is not there"
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"{command[0]} gave no answer ({error})"
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().replace("\n", " ")[:200]
        return (), f"{command[0]} ended with status {done.returncode}: {said}"
    try:
        return parse_gpus(done.stdout), None
    except ValueError as error:
        return (), str(error)


def _file_system_size(path: Path) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks
