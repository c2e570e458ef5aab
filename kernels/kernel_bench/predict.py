"""Predicts verify_mla on sm_120, where it has not run: python -m kernel_bench.predict.

A model, not a measurement. Per 16-token tile of a block with 8 g rows (g: row groups of 8):

    tensor      68 g products m16n8k16 (36 of scores, 32 of values) of 4,096 operations, at the
                target's operations a clock
    shared      bytes through shared memory at 128 a clock: K, V and the fill of the slot, then
                scores and probabilities, which grow with g
    measured    cycles a tile took on the H200: the slope between 64k and 185k for 9 nodes and for
                decode; for other rows (time - the intercept of 9 nodes) x clock / tiles
    best        max(tensor, shared, measured): what the H200 does beside its products (copies,
                softmax, barriers) hides behind sm_120's longer products
    worst       tensor + (measured - tensor on the H200): nothing of it hides

A gang of blocks walks the same tokens, so DRAM allows a tile bytes x gangs / bandwidth. A launch
takes what the H200's takes beside its tiles, scaled by the clocks, plus tiles a gang times the
larger of tile time and DRAM's. Assumed: one block a multiprocessor as on the H200, DRAM at 92 % of
its nominal rate, the boost clock for the best case and the clock that cuBLAS's 400 TFLOP/s imply
for the worst. The floor is the larger of bytes over nominal bandwidth and operations over 504
TFLOP/s.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_bench.cases import ROW_DIM, Problem, problems

ROOT = Path(__file__).resolve().parents[2]
RESOURCES = ROOT / "kernels/resources.json"
RESULTS = ROOT / "ops/results/kernels-h200.json"
README = ROOT / "kernels/README.md"
BEGIN, END = "<!-- predicted: begin -->", "<!-- predicted: end -->"

TILE_TOKENS = 16
MAX_GROUPS = 5
MMAS_PER_GROUP = ROW_DIM // 16 + 512 // 16
FLOP_PER_MMA = 4096
DRAM_EFFICIENCY = 0.92
ROWS = (
    "verify_n9_1k",
    "verify_n9_16k",
    "verify_n9_64k",
    "verify_n9_185k",
    "verify_n32_185k",
    "verify_n64_64k",
    "decode_64k",
    "decode_185k",
    "verify_n9_185k_fp8",
    "verify_h64_b4_64k",
)


@dataclass(frozen=True)
class Processor:
    """A GPU: multiprocessors, clock in Hz, bf16 operations a clock and multiprocessor."""

    processors: int
    clock: float
    flop_per_clock: float


H200 = Processor(132, 1.98e9, 2453.0)
"""mma.sync bf16 measured at 641 TFLOP/s, 1.98 GHz."""
BOOST = Processor(188, 504e12 / (188 * 1024), 1024.0)
SUSTAINED = Processor(188, 400e12 / (188 * 1024), 1024.0)
BANDWIDTHS = {"Workstation": 1792e9, "Server": 1597e9}


@dataclass(frozen=True)
class Work:
    """How a launch divides: row groups of a tile, row tiles (blocks of a gang), gangs, tiles each.

    tile_bytes: of cached rows.
    """

    groups: int
    row_tiles: int
    gangs: int
    tiles: int
    tile_bytes: int

    @classmethod
    def of(cls, problem: Problem, processors: int) -> "Work":
        """The division on a GPU; rows of a request are never mixed with another's."""
        groups = -(-problem.nodes * problem.heads // 8)
        row_tiles = -(-groups // MAX_GROUPS)
        gangs = max(1, processors // row_tiles)
        every = sum(-(-prefix // TILE_TOKENS) for prefix in problem.prefixes)
        tile_bytes = TILE_TOKENS * ROW_DIM * (1 if problem.e4m3 else 2)
        return cls(-(-groups // row_tiles), row_tiles, gangs, -(-every // gangs), tile_bytes)


def tensor_cycles(groups: int, processor: Processor) -> float:
    """Cycles of a tile's products."""
    return MMAS_PER_GROUP * groups * FLOP_PER_MMA / processor.flop_per_clock


def shared_cycles(groups: int, e4m3: bool) -> float:
    """Cycles of a tile's shared-memory traffic: reads of K and V, the fill, scores, weights."""
    rows = TILE_TOKENS * (ROW_DIM + 512 + ROW_DIM) * (1 if e4m3 else 2) / 128
    return rows + 18.0 * groups


@dataclass(frozen=True)
class Prediction:
    """One row on one bandwidth. Cycles of a tile, microseconds of a launch."""

    groups: int
    tensor: float
    shared: float
    measured: float | None
    dram: float
    best_us: float
    worst_us: float
    floor_us: float


@dataclass(frozen=True)
class Calibration:
    """What the H200 measured: cycles of a tile, None if nothing, and microseconds beside tiles."""

    cycles: float | None
    fixed_us: float


def calibrate(name: str, values: Mapping[str, float | None]) -> Calibration:
    """Split a row's time on the H200 into tiles and the rest. values: of rows by name."""

    def tiles(row: str) -> int:
        return Work.of(problems()[row], H200.processors).tiles

    family = "decode" if name.startswith("decode") else "verify_n9"
    middle, longest = (values.get(f"{family}_{length}_us") for length in ("64k", "185k"))
    own = values.get(f"{name}_us")
    if middle is None or longest is None or own is None:
        return Calibration(None, 0.0)
    slope = (longest - middle) / (tiles(f"{family}_185k") - tiles(f"{family}_64k"))
    if name in ("verify_n9_1k", "verify_n9_16k", "verify_n9_64k") or family == "decode":
        return Calibration(slope * 1e-6 * H200.clock, own - slope * tiles(name))
    fixed = longest - slope * tiles("verify_n9_185k")
    return Calibration((own - fixed) / tiles(name) * 1e-6 * H200.clock, fixed)


def predict(problem: Problem, bandwidth: float, calibration: Calibration) -> Prediction:
    """Predict a launch from what the H200 measured, or from products and traffic alone."""
    work, on_h200 = Work.of(problem, BOOST.processors), Work.of(problem, H200.processors)
    tensor, shared = tensor_cycles(work.groups, BOOST), shared_cycles(work.groups, problem.e4m3)
    there = tensor_cycles(on_h200.groups, H200)
    measured = calibration.cycles
    best = max(tensor, shared, measured or 0.0)
    worst = max(best, tensor + max(0.0, (measured or 0.0) - there))
    dram_seconds = work.tile_bytes * work.gangs / (bandwidth * DRAM_EFFICIENCY)

    def microseconds(cycles: float, clock: float) -> float:
        fixed = calibration.fixed_us * H200.clock / clock
        return fixed + work.tiles * max(cycles / clock, dram_seconds) * 1e6

    peak = BOOST.processors * BOOST.clock * BOOST.flop_per_clock
    return Prediction(
        groups=work.groups,
        tensor=tensor,
        shared=shared,
        measured=measured,
        dram=dram_seconds * BOOST.clock,
        best_us=microseconds(best, BOOST.clock),
        worst_us=microseconds(worst, SUSTAINED.clock),
        floor_us=max(problem.bytes / bandwidth, problem.flops / peak) * 1e6,
    )


def table(resources: Mapping[str, Any], values: Mapping[str, float | None]) -> str:
    """The predictions as a Markdown table. resources: resources.json; values: of rows by name."""
    compiled = resources["targets"]["sm_120a"]
    lines = [
        "| predicted, sm_120a | kernel: registers, spilled, shared B, HMMA / LDSM / copies in SASS "
        "| a tile's cycles: tensor, shared, measured on H200 | DRAM allows: Workstation, Server "
        "| predicted us, Workstation | floor | predicted us, Server | floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in ROWS:
        problem, calibration = problems()[name], calibrate(name, values)
        found = [predict(problem, rate, calibration) for rate in BANDWIDTHS.values()]
        first = found[0]
        cache = "E4m3Cache" if problem.e4m3 else "Bf16Cache"
        kernel = compiled[f"verify_mla_kernel<{first.groups}, {cache}>"]
        counts = kernel["counted"]
        copies = sum(counts.get(key, 0) for key in ("LDGSTS", "UBLKCP", "UTMALDG"))
        cells = [
            name,
            f"{kernel['registers']}, {kernel['spilled']}, {kernel['dynamic_shared']:,}, "
            f"{counts.get('HMMA', 0)} / {counts.get('LDSM', 0)} / {copies}",
            f"{first.tensor:.0f}, {first.shared:.0f}, "
            + ("-" if first.measured is None else f"{first.measured:.0f}"),
            ", ".join(f"{item.dram:.0f}" for item in found),
            *(
                cell
                for item in found
                for cell in (f"{item.best_us:.0f} to {item.worst_us:.0f}", f"{item.floor_us:.1f}")
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", action="store_true", help="renew the table in the README too")
    arguments = parser.parse_args()
    values: dict[str, float | None] = {}
    if arguments.results.exists():
        rows = json.loads(arguments.results.read_text())["rows"]
        values = {row["name"]: row["value"] for row in rows}
    text = table(json.loads(RESOURCES.read_text()), values)
    print(text)
    if arguments.readme:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
