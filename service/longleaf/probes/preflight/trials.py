"""Checks that run something on the GPUs, each in processes of its own with a time-out."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longleaf.probes.preflight.expected import Expected
from longleaf.probes.preflight.facts import Facts
from longleaf.probes.preflight.verdict import CheckError, NotAskedError

_LINES = 3


@dataclass(frozen=True, slots=True)
class Trials:
    """The commands: of the kernel's known-answer test, and of one rank of the all-reduce, which
    rank, ranks, a meeting file and the backend are appended to.
    """

    kernel: tuple[str, ...] = (sys.executable, "-m", "longleaf.engine.preflight_kernel")
    all_reduce: tuple[str, ...] = (sys.executable, "-m", "longleaf.engine.preflight_nccl")
    backend: str = "nccl"

    def check_kernel(self, facts: Facts, expected: Expected) -> str:
        """The kernel loads on every GPU and gives the right answer."""
        _need_gpus(facts)
        (status, said), *_ = run_together([self.kernel], expected.kernel_seconds)
        if status is None:
            raise CheckError(
                f"the verify kernel gave no answer in {expected.kernel_seconds:.0f} s",
                "look for an Xid error in the node's kernel log, and reset the GPU",
            )
        if status != 0:
            raise CheckError(
                said or f"the kernel's test ended with status {status}",
                "take the image built for this GPU, or build the kernels for it (make kernels)",
            )
        return said

    def check_nccl(self, facts: Facts, expected: Expected) -> str:
        """An all-reduce over every rank gives the right sum in time."""
        _need_gpus(facts)
        ranks = expected.gpus
        with tempfile.TemporaryDirectory() as folder:
            meeting = str(Path(folder, "meeting"))
            commands = [
                (*self.all_reduce, str(rank), str(ranks), meeting, self.backend)
                for rank in range(ranks)
            ]
            results = run_together(commands, expected.nccl_seconds)
        for rank, (status, said) in enumerate(results):
            if status not in (0, None, -signal.SIGKILL):
                raise CheckError(
                    f"NCCL's all-reduce failed on rank {rank}: {said or f'status {status}'}",
                    "set NCCL_DEBUG=INFO to see the transport; /dev/shm and P2P are the usual ones",
                )
        hung = [rank for rank, (status, _) in enumerate(results) if status != 0]
        if hung:
            raise CheckError(
                f"NCCL's all-reduce over {ranks} GPUs did not end in {expected.nccl_seconds:.0f} s "
                f"(waiting: ranks {', '.join(map(str, hung))})",
                "NCCL_P2P_DISABLE=1 (engine.nccl.disableP2P), or the IOMMU and ACS off in the BIOS",
            )
        return results[0][1]


def _need_gpus(facts: Facts) -> None:
    if facts.gpu_error is not None or not facts.gpus:
        raise NotAskedError(f"no GPU is known: {facts.gpu_error}")


def run_together(commands: Sequence[Sequence[str]], seconds: float) -> list[tuple[int | None, str]]:
    """Run commands side by side; status (None: stopped at the time-out) and last lines of each.

    When one fails, the others, which would wait for it for ever, are stopped after a moment.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(len(commands))]
        processes = []
        try:
            for command, path in zip(commands, outputs, strict=True):
                with path.open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            _wait(processes, seconds)
            statuses = [process.poll() for process in processes]
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [(status, _tail(path)) for status, path in zip(statuses, outputs, strict=True)]


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in processes]
        if all(status is not None for status in statuses):
            return
        if any(statuses):
            deadline = min(deadline, time.monotonic() + 2.0)
        time.sleep(0.05)


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return " ".join(line.strip() for line in lines[-_LINES:])[:400]
