"""Ctrl-C, or another signal, in the middle of a probe."""

import signal
import subprocess
import sys


def interrupted(lines: int, *arguments: str, by: signal.Signals = signal.SIGINT) -> tuple[int, str]:
    """Exit code and output of ``longleaf ARGUMENTS``, interrupted after so many progress lines."""
    # A shell without job control starts what it runs in the background deaf to Ctrl-C.
    with subprocess.Popen(
        [sys.executable, "-m", "longleaf", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stderr is not None
        for _ in range(lines):
            assert process.stderr.readline().startswith("[")
        process.send_signal(by)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out
