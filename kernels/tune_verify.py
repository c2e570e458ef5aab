"""Time verify_mla on a GPU over many layer buffers, for several builds and work splits.

python kernels/tune_verify.py NAME=LIBRARY... [--only CASE_SUBSTRING] [--json FILE]

Prints, a case a row and a build a column, microseconds a launch: the median of CUDA-graph replays
over 61 distinct layer buffers. For development; `make bench-kernels` is the benchmark of record.
"""

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from torch import Tensor

from longleaf_kernels._library import Library
from longleaf_kernels.verify import ROW_DIM, _Arguments

LAYERS = 61
SLOTS = 189_096
FLOP_PER_PAIR = 2 * (576 + 512)
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Timing:
    """One row: lengths, nodes and heads, and how the work is split (0 chooses)."""

    name: str
    prefixes: tuple[int, ...]
    nodes: int
    heads: int = 8
    e4m3: bool = False
    causal: bool = False
    row_groups: int = 0
    gang: int = 0
    min_tiles: int = 0
    layers: int = LAYERS

    @property
    def flops(self) -> float:
        """Return the arithmetic of one launch over the prefixes."""
        return float(sum(self.prefixes)) * self.nodes * self.heads * FLOP_PER_PAIR

    @property
    def bytes(self) -> float:
        """Return the bytes of the prefixes' rows."""
        return float(sum(self.prefixes)) * ROW_DIM * (1 if self.e4m3 else 2)


def log_uniform(count: int, low: float, high: float) -> tuple[int, ...]:
    """Return lengths evenly spread in the logarithm."""
    return tuple(int(low * (high / low) ** (i / (count - 1))) for i in range(count))


def cases() -> list[Timing]:
    """Return the rows of the bar table, then variants of the work split."""
    base = Timing("n9 185k", (185_000,), 9)
    rows = [
        *(replace(base, name=f"n9 {n}", prefixes=(n,)) for n in (0, 1024, 4096, 16_384, 65_536)),
        base,
        Timing("n8 185k", (185_000,), 8),
        Timing("n16 185k", (185_000,), 16),
        Timing("n32 185k", (185_000,), 32),
        Timing("n64 64k", (65_536,), 64),
        *(Timing(f"n1 {n}", (n,), 1) for n in (1024, 16_384, 65_536, 185_000)),
        Timing("n9 185k e4m3", (185_000,), 9, e4m3=True),
        Timing("n32 185k e4m3", (185_000,), 32, e4m3=True),
        Timing("n1 185k e4m3", (185_000,), 1, e4m3=True),
        Timing("b32 mixed n9", log_uniform(32, 1000, 185_000), 9, layers=5),
        Timing("b4 64k h64 n9", (65_536,) * 4, 9, heads=64, layers=5),
        Timing("extend16 32k", (32_768,), 16, causal=True),
    ]
    splits = [
        *(replace(base, name=f"n9 1024 min_tiles {m}", prefixes=(1024,), min_tiles=m)
          for m in (1, 2, 4, 6, 8, 100)),
        *(replace(base, name=f"n9 185k groups {g}", row_groups=g) for g in (3, 4)),
        *(Timing(f"n32 185k groups {g}", (185_000,), 32, row_groups=g) for g in (3, 4, 5)),
        *(Timing(f"n64 64k groups {g}", (65_536,), 64, row_groups=g) for g in (4, 5)),
        *(Timing(f"n1 65536 min_tiles {m}", (65_536,), 1, min_tiles=m) for m in (16, 32, 64)),
    ]  # fmt: skip
    return rows + splits


class Bench:
    """Layer buffers and the timing of calls over them."""

    def __init__(self) -> None:
        self.pool = torch.empty(LAYERS, SLOTS, ROW_DIM, dtype=torch.bfloat16, device=DEVICE)
        for layer in self.pool:
            layer.normal_()
        self.pool_e4m3 = torch.empty(
            LAYERS, SLOTS, ROW_DIM, dtype=torch.float8_e4m3fn, device=DEVICE
        )
        for source, target in zip(self.pool, self.pool_e4m3, strict=True):
            target.copy_(source)
        self.workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)

    def microseconds(self, library: Library, case: Timing) -> float:
        """Return the median time of a launch."""
        total = sum(case.prefixes)
        order = torch.cat([torch.randperm(SLOTS, device=DEVICE) for _ in range(total // SLOTS + 1)])
        indices = order[: max(total, 1)].to(torch.int32)
        tokens = case.nodes * len(case.prefixes)
        indptr = torch.tensor([0, *case.prefixes]).cumsum(0).to(torch.int32).to(DEVICE)
        q = torch.randn(tokens, case.heads, ROW_DIM, device=DEVICE).bfloat16()
        tree = torch.randn(tokens, ROW_DIM, device=DEVICE).bfloat16()
        visible = torch.full((tokens, 1), -1, dtype=torch.int64, device=DEVICE)
        out = torch.empty(tokens, case.heads, 512, dtype=torch.bfloat16, device=DEVICE)
        launch = library.function(
            "longleaf_verify_mla", ctypes.POINTER(_Arguments), ctypes.c_void_p
        )
        arguments = _Arguments(
            q=q.data_ptr(), kv_indptr=indptr.data_ptr(), kv_indices=indices.data_ptr(),
            tree_kv=tree.data_ptr(), visible=None if case.causal else visible.data_ptr(),
            out=out.data_ptr(), workspace=self.workspace.data_ptr(), tokens=tokens, slots=SLOTS,
            indices=len(indices), batch=len(case.prefixes), nodes=case.nodes, heads=case.heads,
            page_size=1, e4m3=case.e4m3, softmax_scale=192**-0.5, kv_scale=1.0,
            row_groups=case.row_groups, gang=case.gang, min_tiles=case.min_tiles,
        )  # fmt: skip
        pool: Tensor = self.pool_e4m3 if case.e4m3 else self.pool

        def step() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for layer in pool[: case.layers]:
                arguments.kv_pool = layer.data_ptr()
                library.check(launch(ctypes.byref(arguments), stream), "verify_mla")

        return self.replay(step) / case.layers

    @staticmethod
    def replay(step: Callable[[], None], replays: int = 5) -> float:
        """Return the median microseconds of a captured step."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                step()
            graph.replay()
            times = []
            for _ in range(replays):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(stream)
                graph.replay()
                end.record(stream)
                stream.synchronize()
                times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times)


def copy_rate(pool: Tensor) -> float:
    """Return bytes a second, read and written, of a large device copy."""
    half = pool.shape[0] // 2
    source, target = pool[:half], pool[half : 2 * half]
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * source.numel() * source.element_size() / statistics.median(times) * 1e3


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("builds", nargs="+", help="NAME=LIBRARY")
    parser.add_argument("--only", default="")
    parser.add_argument("--peak", type=float, default=632e12, help="mma.sync bf16 FLOP/s")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    builds = {
        name: Library(Path(path)) for name, path in (item.split("=") for item in arguments.builds)
    }
    bench = Bench()
    copy = copy_rate(bench.pool)
    print(f"copy {copy / 1e9:.0f} GB/s; columns: us (% of copy, % of {arguments.peak:.3g} FLOP/s)")
    results: dict[str, dict[str, float]] = {}
    for case in cases():
        if arguments.only not in case.name:
            continue
        results[case.name] = {}
        cells = []
        for name, library in builds.items():
            us = bench.microseconds(library, case)
            results[case.name][name] = us
            memory = case.bytes / us * 1e6 / copy * 100
            tensor = case.flops / us * 1e6 / arguments.peak * 100
            cells.append(f"{name} {us:8.2f} ({memory:4.1f} {tensor:4.1f})")
        print(f"{case.name:24s} " + "  ".join(cells), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"copy": copy, "us": results}, indent=1))


if __name__ == "__main__":
    main()
