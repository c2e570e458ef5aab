"""python -m kernel_bench: measure on this GPU, print against bars, write results and picture."""

import argparse
import os
import sys
from pathlib import Path

import torch

from kernel_bench.machine import describe_gpu
from kernel_bench.measure import Bench
from kernel_bench.rows import rows
from ops.bench.results import RESULTS_DIR, format_table, write_results


def main() -> int:
    """Run from the command line; 0 once measured, whether or not bars are met."""
    parser = argparse.ArgumentParser(prog="make bench-kernels", description=__doc__)
    parser.add_argument(
        "--sglang",
        default=os.environ.get("SGLANG_SRC"),
        help="directory with the package sglang (an unpacked wheel); default: $SGLANG_SRC, or an "
        "installed one",
    )
    parser.add_argument("--no-grid", action="store_true", help="leave out the grid against Triton")
    parser.add_argument("--commit", help="recorded where this is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS_DIR, help="directory")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench-kernels needs a CUDA GPU; torch sees none", file=sys.stderr)
        return 2
    gpu = describe_gpu()
    found = rows(Bench(arguments.sglang).run(with_grid=not arguments.no_grid))
    path = write_results(
        "kernels",
        "make bench-kernels" + (" BENCH_ARGS=--no-grid" if arguments.no_grid else ""),
        found,
        gpu=gpu.name,
        slug=gpu.slug,
        driver=gpu.driver,
        commit=arguments.commit,
        directory=arguments.output,
    )
    print(format_table([row for row in found if not row.name.startswith("grid_b")]))
    points = [row for row in found if row.name.startswith("grid_b")]
    points.sort(key=lambda row: row.value or 0.0)
    if points:
        print(f"\nslowest of {len(points)} grid points against SGLang's Triton kernels:")
        print(format_table(points[:8]))
    print(f"written to {path}")
    try:
        from kernel_bench.roofline import draw

        draw(path, path.with_suffix(".png"))
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
    else:
        print(f"drawn to {path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
