"""Times launches: medians of CUDA-graph replays over distinct buffers, and device copies."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Launch = Callable[[Tensor], None]
"""Enqueues one launch that reads one layer's buffer."""


@dataclass(frozen=True)
class Sample:
    """Median and interquartile range of n measurements."""

    median: float
    spread: tuple[float, float]
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Summarize measurements."""
        if len(values) == 1:
            return cls(values[0], (values[0], values[0]), 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, (low, high), len(values))

    def map(self, function: Callable[[float], float]) -> "Sample":
        """Apply a monotonic function."""
        low, high = sorted(map(function, self.spread))
        return Sample(function(self.median), (low, high), self.n)


def milliseconds(action: Callable[[], object], repeats: int) -> list[float]:
    """Time an action on the current stream, each time on its own."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return times


def microseconds(
    launch: Launch,
    layers: Sequence[Tensor],
    replays: int = 20,
    replay_ms: float = 100.0,
    total_ms: float = 1000.0,
) -> Sample:
    """Time one launch: replays of a graph with one launch a layer, over the number of layers.

    Launches that take long go over fewer layers, so that a replay lasts at most replay_ms, and
    are replayed less often, so that all of them last about total_ms; at least once.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(layers[0])  # compiles
        stream.synchronize()
        once = max(milliseconds(lambda: launch(layers[-1]), 1)[0], 1e-3)
        used = layers[: max(1, min(len(layers), int(replay_ms / once)))]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for layer in used:
                launch(layer)
        warm = milliseconds(graph.replay, 1)[0]
        times = milliseconds(graph.replay, max(1, min(replays, int(total_ms / warm))))
    return Sample.of([time * 1e3 / len(used) for time in times])


def copy_rate(pool: Tensor) -> Sample:
    """Bytes a second, read and written, of a device copy of half the pool onto the other."""
    half = pool.shape[0] // 2
    source, target = pool[:half], pool[half : 2 * half]
    moved = 2.0 * source.numel() * source.element_size()
    target.copy_(source)
    rates = [moved / time * 1e3 for time in milliseconds(lambda: target.copy_(source), 10)]
    return Sample.of(rates)
