"""DCGM 4's profiling fields, through its command ``dcgmi dmon``."""

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

from longleaf.exporters.source import LEAST_INTERVAL, Figures, SourceError

_FIELDS: Mapping[str, int] = {
    "tensor_active_ratio": 1004,
    "dram_active_ratio": 1005,
    "sm_active_ratio": 1002,
    "sm_resident_ratio": 1001,
    "pcie_transmit_bytes_per_second": 1009,
    "pcie_receive_bytes_per_second": 1010,
}
_SECONDS = 10.0


def run_dmon(fields: Sequence[int]) -> str:
    """A table of two samples, for the first one of a watch that just began may lack figures.
    ``SourceError`` if there is none.
    """
    if shutil.which("dcgmi") is None:
        raise SourceError("dcgmi is not installed (DCGM 4)")
    delay = str(round(LEAST_INTERVAL * 1e3))
    command = ["dcgmi", "dmon", "-e", ",".join(map(str, fields)), "-d", delay, "-c", "2"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceError(f"dcgmi: {error}") from error
    if done.returncode:
        raise SourceError(f"dcgmi: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout


def parse_dmon(text: str, metrics: Sequence[str]) -> dict[str, dict[str, float]]:
    """Figures by GPU of a table with a column for each of ``metrics``, the last row of each GPU;
    N/A is left out.
    """
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) != 2 + len(metrics) or words[0] != "GPU":
            continue
        found[words[1]] = {
            metric: float(word)
            for metric, word in zip(metrics, words[2:], strict=True)
            if word != "N/A"
        }
    return found


class Dcgm:
    """A host engine that runs, asked once a sample."""

    name = "dcgm"

    def __init__(self, run: Callable[[Sequence[int]], str] = run_dmon) -> None:
        self._run = run

    def open(self) -> Mapping[str, str]:
        """See ``Source``."""
        found = self.sample()
        if not found:
            raise SourceError("dcgmi: no GPU in its answer")
        return {
            metric: "" if all(metric in figures for figures in found.values()) else "N/A"
            for metric in _FIELDS
        }

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        """See ``Source``."""
        return {}

    def sample(self) -> Mapping[str, Figures]:
        """See ``Source``."""
        return parse_dmon(self._run(list(_FIELDS.values())), list(_FIELDS))

    def close(self) -> None:
        """See ``Source``."""
