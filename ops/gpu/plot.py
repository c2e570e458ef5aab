"""A plot of step time against context, as SVG: logarithmic axes, one line a system.

``python -m ops.gpu.plot`` draws it from ops/results/engine-h200.json.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import log10
from pathlib import Path
from typing import Any

import click

from ops.bench.results import RESULTS_DIR

Curve = Sequence[tuple[int, float]]
"""(context in tokens, milliseconds a step), ascending."""

OBSERVED: Curve = ((1400, 8.4), (32_768, 159.0), (65_536, 327.0), (185_000, 1430.0))
"""What the user observed on 8 x RTX PRO 6000 before this project (shared/facts/mission.md)."""

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 860, 520, 70, 30, 250, 60
_CONTEXTS = (1000, 220_000)
_TIMES = (0.2, 2000.0)
_COLOURS = ("#b3261e", "#1a56b0", "#7a7a7a", "#1b7f3b")
_BYTES_A_ROW = 1152
_LAYERS = 61
_READ_GB_A_SECOND = 4348.0
"""What a plain reduction reads on the H200 that was measured (shared/facts/mission.md)."""


MEASURED: Mapping[str, str] = {
    "DDTREE, 9 nodes, one H200": "ddtree_step_ms",
    "SGLang DFLASH, chain of 8, one H200": "stock_dflash_step_ms",
}
"""What is drawn from a results file: label and the rows' name without the context."""


def name_of(context: int) -> str:
    """A context in a row's name: 1024 is 1k, 185000 is 185k."""
    return f"{context // 1024 if context % 1024 == 0 else context // 1000}k"


def context_of(name: str) -> int:
    """The context that a row's name says."""
    thousands = int(name.removesuffix("k"))
    return 185_000 if thousands == 185 else 1024 * thousands


def curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The measured curves of a results file's rows."""
    found: dict[str, list[tuple[int, float]]] = {label: [] for label in MEASURED}
    for row in rows:
        for label, name in MEASURED.items():
            match = re.fullmatch(rf"{name}_(\d+k)", row["name"])
            if match and row["value"] is not None:
                found[label].append((context_of(match[1]), row["value"]))
    return {label: sorted(points) for label, points in found.items()}


def write_plot(results: Path) -> Path:
    """Draw a results file's rows beside it, and return the SVG's path."""
    plot = results.with_suffix(".svg")
    plot.write_text(step_time_plot(curves(json.loads(results.read_text())["rows"])))
    return plot


def floor(contexts: Sequence[int]) -> list[tuple[int, float]]:
    """Milliseconds to read the latent KV of 61 layers once, at the GPU's measured read rate."""
    return [(c, 1e-6 * c * _BYTES_A_ROW * _LAYERS / _READ_GB_A_SECOND) for c in contexts]


def step_time_plot(measured: Mapping[str, Curve]) -> str:
    """SVG of the measured curves beside the observed one and the memory floor."""
    longest = max((c for curve in measured.values() for c, _ in curve), default=185_000)
    curves = {
        "observed before, 8 x RTX PRO 6000": OBSERVED,
        **{label: curve for label, curve in measured.items() if curve},
        "floor: reading the KV once": floor((16_384, 32_768, 65_536, 131_072, longest)),
    }
    parts = [*_axes(), *_lines(curves)]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _x(context: float) -> float:
    low, high = (log10(value) for value in _CONTEXTS)
    return _LEFT + (log10(context) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)


def _y(ms: float) -> float:
    low, high = (log10(value) for value in _TIMES)
    return _HEIGHT - _BOTTOM - (log10(ms) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _axes() -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for ms in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000):
        y = round(_y(ms), 1)
        parts.append(f'<path d="M{_LEFT} {y}H{right}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{ms}</text>')
    for context, label in (
        (1024, "1k"),
        (8192, "8k"),
        (32_768, "32k"),
        (65_536, "64k"),
        (131_072, "128k"),
        (185_000, "185k"),
    ):
        x = round(_x(context), 1)
        parts.append(f'<path d="M{x} {_TOP}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 16}" text-anchor="middle">context, tokens</text>'
    )
    parts.append(
        f'<text transform="translate(18 {(_TOP + bottom) / 2}) rotate(-90)" '
        f'text-anchor="middle">time of a decode step, ms</text>'
    )
    return parts


def _lines(curves: Mapping[str, Curve]) -> list[str]:
    parts = []
    for number, (label, curve) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [(round(_x(c), 1), round(_y(ms), 1)) for c, ms in curve]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
        y = _TOP + 20 + 22 * number
        x = _WIDTH - _RIGHT + 16
        parts.append(f'<path d="M{x} {y - 4}h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 24}" y="{y}">{escape(label)}</text>')
    return parts


@click.command()
def main() -> None:
    """Draw ops/results/engine-h200.svg."""
    click.echo(f"written to {write_plot(RESULTS_DIR / 'engine-h200.json')}")


if __name__ == "__main__":
    main()
