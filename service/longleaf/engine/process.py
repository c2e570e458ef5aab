"""Processes of the launcher, none of which outlives it."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from longleaf.engine.drift import GUARD_VARIABLE

_TAIL_LINES = 30
CRASH_ENVIRONMENT = {
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}
"""Unless the environment says otherwise. When a rank dies, SGLang would wait 65 s for dumps of the
others before it ends; meanwhile its streams neither go on nor break (two ranks on H200s).
"""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def ended_with_us(number: int) -> Callable[[], None]:
    """Return what a child does before it runs: ask for a signal when this process ends."""
    parent = os.getpid()

    def ask() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return ask


@contextlib.contextmanager
def killed_on_error(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Kill the process where waiting for it ends in an exception, such as a signal's."""
    try:
        yield
    except BaseException:
        process.kill()
        process.wait()
        raise


class Server:
    """The server's process, its group and the last lines that it wrote."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**CRASH_ENVIRONMENT, **os.environ, GUARD_VARIABLE: "1"},
            preexec_fn=ended_with_us(signal.SIGTERM),
        )
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._signalled = False

    def _read(self) -> None:
        stream: IO[bytes] | None = self._process.stdout
        assert stream is not None
        with stream:
            for line in stream:
                text = line.decode(errors="replace")
                self._lines.append(text)
                sys.stderr.write(text)
                sys.stderr.flush()

    def signalled(self) -> bool:
        """Return whether a signal was passed on."""
        return self._signalled

    @property
    def status(self) -> int | None:
        """Exit status as a shell tells it (128 + signal); None while the process runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def tail(self) -> str:
        """Return the last lines of the output."""
        self._reader.join(timeout=2.0)
        return "".join(self._lines)

    def forward(self, number: int) -> None:
        """Send a signal to the server alone: it drains, and ends its own children."""
        self._signalled = True
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end for so long; the exit status, or None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.status

    def end(self, grace_seconds: float) -> None:
        """SIGTERM, and after the grace SIGKILL, for the server and whatever it started."""
        if self._process.poll() is None:
            self._process.terminate()
            self.wait(grace_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
