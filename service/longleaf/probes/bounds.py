"""What bounds a GPU in a phase: compute, memory or latency, and what each figure says of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

FIGURES = (
    *("tensor_active_ratio", "dram_active_ratio", "sm_active_ratio", "sm_resident_ratio"),
    "power_watts",
)
"""What is told of each GPU."""
_NAMES: tuple[tuple[str, str, float, str], ...] = (
    ("tensor_active_ratio", "tensor pipes", 100, " %"),
    ("dram_active_ratio", "memory", 100, " %"),
    ("sm_active_ratio", "SMs with work", 100, " %"),
    ("sm_resident_ratio", "resident", 100, " %"),
    ("power_watts", "power", 1, " W"),
)
_BUSY = 0.5
_WORKS = 0.15
"""As of the alert LongleafGpuResidentButIdle."""
_RESIDENT = 0.5
_FEW_SMS = 0.15
_MOST_SMS = 0.6


@dataclass(slots=True)
class Gpu:
    """Samples of one GPU in one phase, by metric."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    def mean(self, metric: str) -> float | None:
        """Mean over the phase; None where the exporter does not tell it."""
        values = self.samples.get(metric)
        return fmean(values) if values else None

    @property
    def bound(self) -> str:
        """One of compute, memory, compute and memory, mixed, latency, idle, unknown."""
        tensor, dram = self.mean("tensor_active_ratio"), self.mean("dram_active_ratio")
        resident = self.mean("sm_resident_ratio")
        if tensor is not None and dram is not None and min(tensor, dram) >= _BUSY:
            return "compute and memory"
        if tensor is not None and tensor >= _BUSY:
            return "compute"
        if dram is not None and dram >= _BUSY:
            return "memory"
        if tensor is None or dram is None or resident is None:
            return "unknown"
        if max(tensor, dram) >= _WORKS:
            return "mixed"
        return "latency" if resident >= _RESIDENT else "idle"

    def meaning(self) -> str:
        """What ``bound`` means here, in words."""
        bound = self.bound
        if bound == "latency":
            return f"{_MEANING[bound]}: {self._waits()}"
        resident = self.mean("sm_resident_ratio")
        if bound == "mixed" and resident is not None and 1 - resident >= _WORKS:
            return f"{_MEANING[bound]}, and {1 - resident:.0%} of the time no kernel is there"
        return _MEANING[bound]

    def _waits(self) -> str:
        """What kernels that are there and do not work wait for, by the SMs that they fill."""
        filled = self.mean("sm_active_ratio")
        if filled is None:
            return "too few blocks, launches, or waiting for other GPUs"
        told = f"of the SMs {filled:.0%} have work"
        if filled < _FEW_SMS:
            return f"{told}, so kernels have too few blocks"
        if filled < _MOST_SMS:
            return f"{told}, so kernels are short or small: launches, or waiting for other GPUs"
        return f"{told}, so it is their work that waits, for its own results or scattered memory"

    def moved(self, seconds: float) -> tuple[float, float] | None:
        """Bytes of device memory moved in so long, and the seconds that its peak takes for them;
        None where the exporter does not tell.
        """
        share, peak = self.mean("dram_active_ratio"), self.mean("memory_peak_bytes_per_second")
        if share is None or peak is None:
            return None
        return share * peak * seconds, share * seconds

    def figures(self) -> str:
        """The means in words."""
        told = []
        for metric, name, scale, unit in _NAMES:
            value = self.mean(metric)
            told.append(f"{name} {'unknown' if value is None else f'{value * scale:.1f}{unit}'}")
        return ", ".join(told)


@dataclass(slots=True)
class Phase:
    """One phase, by GPU: what one of eight does is not to be lost in a mean.

    ``steps``: seconds a decode step, an answer each. ``lost``: why samples are missing, each.
    """

    name: str
    gpus: dict[str, Gpu] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def take(self, figures: Mapping[str, Mapping[str, float]]) -> None:
        """Add a sample: values by GPU and metric."""
        for name, values in figures.items():
            samples = self.gpus.setdefault(name, Gpu()).samples
            for metric, value in values.items():
                samples.setdefault(metric, []).append(value)

    @property
    def bounds(self) -> list[str]:
        """What bounds the GPUs at work; ``idle`` alone if none works, ``unknown`` if none is seen.

        A GPU that serves nothing says nothing of those that serve.
        """
        found = list(dict.fromkeys(gpu.bound for gpu in self.gpus.values())) or ["unknown"]
        return [bound for bound in found if bound != "idle"] or found

    @property
    def step(self) -> float | None:
        """Mean seconds of a decode step; None where none was timed."""
        return fmean(self.steps) if self.steps else None

    def words(self) -> str:
        """The phase in sentences: one for each thing that bounds GPUs."""
        alike: dict[str, list[str]] = {}
        for name, gpu in self.gpus.items():
            alike.setdefault(gpu.bound, []).append(name)
        if not alike:
            why = f" ({self.lost[-1]})" if self.lost else ""
            return f"{self.name}: no sample{why}."
        said = [
            f"{self.name}: {self.gpus[names[0]].meaning()} (GPU {', '.join(names)}; "
            f"{'' if len(names) == 1 else f'of {names[0]}: '}{self.gpus[names[0]].figures()})."
            for names in alike.values()
        ]
        if self.lost:
            said.append(f"Samples lost: {len(self.lost)} ({self.lost[-1]}).")
        return " ".join((*said, *self._step_words()))

    def _step_words(self) -> list[str]:
        """How long a step takes, and how long the memory that it moves would."""
        if self.step is None:
            return []
        text = f"A step takes {self.step * 1e3:.2f} ms"
        working = [gpu for gpu in self.gpus.values() if gpu.bound != "idle"]
        moved = [found for gpu in working if (found := gpu.moved(self.step))]
        if moved:
            size, least = max(moved)
            text += f"; what it moves of device memory, {size / 1e9:.2f} GB, takes "
            text += f"{least * 1e3:.2f} ms at the card's peak"
        return [f"{text}."]


_MEANING: Mapping[str, str] = {
    "compute": "compute-bound, the tensor pipes work",
    "memory": "memory-bound, device memory is busy",
    "compute and memory": "compute- and memory-bound at once",
    "mixed": "bound by no one thing, tensor pipes or memory work for a part of the time",
    "latency": "latency-bound, kernels are there and neither tensor pipes nor memory work",
    "idle": "idle, no kernel is there most of the time",
    "unknown": "cannot be told, for the exporter lacks figures",
}
