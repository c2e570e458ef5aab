"""Draws the roofline from a results file: python -m kernel_bench.roofline FILE [PICTURE]."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_bench.cases import problems

LABELS = {
    "": ("verify_mla", "o", "#1b6e3c"),
    "_sglang": ("SGLang's Triton kernel", "s", "#b03a2e"),
    "_splitkv": ("plain split-KV in Triton", "^", "#7d6608"),
}

LABEL_PLACES = {
    "verify_n9_185k": (-6, -3, "right"),
    "extend16_32k": (7, -7, "left"),
    "verify_n9_185k_fp8": (0, 7, "center"),
    "verify_n32_185k": (0, -13, "center"),
    "verify_n64_64k": (-2, -13, "center"),
    "verify_h64_b4_64k": (4, 6, "left"),
}
"""Offsets in points, and the alignment, of labels that would lie over others."""


@dataclass(frozen=True)
class Point:
    """A measured launch: operations a byte of cache, operations a second."""

    name: str
    intensity: float
    rate: float


def points(values: Mapping[str, float | None], suffix: str) -> list[Point]:
    """The launches of one contender; problems with an empty prefix have no intensity."""
    found = []
    for name, problem in problems().items():
        us = values.get(f"{name}{suffix}_us")
        if us and problem.tokens:
            intensity = problem.flops / problem.bytes
            found.append(Point(name, intensity, problem.flops / us * 1e6))
    return found


def draw(results: Path, picture: Path) -> None:
    """Write a PNG. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    document = json.loads(results.read_text())
    values = {row["name"]: row["value"] for row in document["rows"]}
    copy, mma = values.get("copy_gb_s"), values.get("mma_bf16_tflop_s")
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    if copy and mma:
        _roof(axes, copy * 1e9, mma * 1e12)
    for suffix, (label, marker, colour) in LABELS.items():
        found = points(values, suffix)
        if not found:
            continue
        xs, ys = [p.intensity for p in found], [p.rate / 1e12 for p in found]
        axes.scatter(xs, ys, marker=marker, color=colour, label=label, zorder=3)
        if suffix == "":
            for point in found:
                across, up, side = LABEL_PLACES.get(point.name, (6, -3, "left"))
                axes.annotate(
                    point.name.replace("verify_", ""),
                    (point.intensity, point.rate / 1e12),
                    textcoords="offset points",
                    xytext=(across, up),
                    ha=side,
                    fontsize=7,
                )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP a byte of cached rows, each read once",
        ylabel="TFLOP/s",
        title=f"Attention over an MLA cache, {document['machine']['gpu']}, {document['date'][:10]}",
    )
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(loc="lower right")
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def _roof(axes: Any, bandwidth: float, peak: float) -> None:
    """The two ceilings, bytes and operations a second."""
    xs = [4.0, peak / bandwidth, 4000.0]
    axes.plot(
        xs, [min(x * bandwidth, peak) / 1e12 for x in xs], color="black", label="measured ceilings"
    )
    axes.annotate(
        f"copy {bandwidth / 1e9:,.0f} GB/s", (5, 5.5 * bandwidth / 1e12), rotation=33, fontsize=8
    )
    axes.annotate(f"mma.sync bf16 {peak / 1e12:.0f} TFLOP/s", (500, peak / 1e12 * 1.06), fontsize=8)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path, nargs="?", help="default: the same name, .png")
    arguments = parser.parse_args()
    picture: Path = arguments.picture or arguments.results.with_suffix(".png")
    draw(arguments.results, picture)
    print(f"drawn to {picture}")


if __name__ == "__main__":
    main()
