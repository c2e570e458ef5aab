"""Measures the peak of mma.sync with bf16 inputs, by a small kernel that nvcc compiles here."""

import ctypes
import os
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import torch

from cuda_build import find_toolkit
from kernel_bench.timing import Sample, milliseconds

SOURCE = Path(__file__).with_name("peak.cu")
FLOP_PER_MMA = 2 * 16 * 8 * 16
CHAINS = 8
ITERATIONS = 40_000
SHAPES = ((1, 4), (1, 8), (2, 8), (1, 16))
"""Blocks a multiprocessor and warps a block."""


def mma_rate(device: torch.device) -> Sample:
    """Operations a second of the fastest shape. Raises BuildError without nvcc."""
    with tempfile.TemporaryDirectory() as directory:
        library = _compile(Path(directory), torch.cuda.get_device_capability(device))
        launch = ctypes.CDLL(str(library)).longleaf_bench_mma
    launch.argtypes = (ctypes.c_int,) * 3 + (ctypes.c_void_p,) * 2
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    sink = torch.empty(processors * 32 * 32, device=device)

    def run(blocks: int, warps: int) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        status = launch(blocks, warps, ITERATIONS, sink.data_ptr(), stream)
        if status:
            raise RuntimeError(f"the mma.sync peak kernel failed with CUDA error {status}")

    samples = []
    for per_processor, warps in SHAPES:
        blocks = per_processor * processors
        flops = float(blocks * warps * ITERATIONS * CHAINS * FLOP_PER_MMA)
        run(blocks, warps)
        times = milliseconds(partial(run, blocks, warps), 10)
        samples.append(Sample.of([flops / time * 1e3 for time in times]))
    return max(samples, key=lambda sample: sample.median)


def _compile(directory: Path, capability: tuple[int, int]) -> Path:
    output = directory / "peak.so"
    major, minor = capability
    command = [
        *(str(find_toolkit(os.environ).nvcc), "-O3", f"-arch=sm_{major}{minor}"),
        *("--shared", "-Xcompiler", "-fPIC", "-o", str(output), str(SOURCE)),
    ]
    subprocess.run(command, check=True)
    return output
