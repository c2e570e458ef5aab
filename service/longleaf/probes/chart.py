"""A line chart with spreads as one HTML page, without assets from elsewhere."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 760, 380, 70, 20, 50
_LABEL = 60
_COLORS = ("#1b6ca8", "#c8553d", "#588157", "#8d6a9f", "#b8860b", "#444444")


@dataclass(frozen=True, slots=True)
class Point:
    """``low`` and ``high`` bound the samples behind ``value``."""

    x: float
    value: float
    low: float
    high: float


def page(
    title: str,
    words: str,
    unit: str,
    curves: Mapping[str, Sequence[Point]],
    table: Sequence[Sequence[str]],
) -> str:
    """The page: heading, answer in words, chart (x logarithmic), table (first row: head)."""
    return _page(title, words, _svg(unit, curves), table)


def _page(title: str, words: str, picture: str, table: Sequence[Sequence[str]]) -> str:
    head, *rows = table
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>body{font:16px sans-serif;max-width:960px;margin:2em auto;color:#222}"
        "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;"
        "text-align:right}td:first-child,th:first-child{text-align:left}</style>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(words)}</p>{picture}"
        f"<table><tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>{body}"
        "</table></html>\n"
    )


def _svg(unit: str, curves: Mapping[str, Sequence[Point]]) -> str:
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return "<p>Nothing was measured.</p>"
    xs = sorted({point.x for point in points})
    low, high = math.log(xs[0]), math.log(xs[-1])
    top = max(point.high for point in points) * 1.1 or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log(x) - low) / (high - low) if high > low else 0.5
        across = _LEFT + 20 + share * (_WIDTH - _LEFT - 40)
        return across, _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-size="13">']
    for tick in range(5):
        value = top * tick / 4
        _, y = at(xs[0], value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    free = 0.0
    for x in xs:
        across, y = at(x, 0)
        if across >= free:
            free = across + _LABEL
            text = f"{x:.0f}"
            parts.append(
                f'<text x="{across:.1f}" y="{y + 20:.1f}" text-anchor="middle">{text}</text>'
            )
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 6}">{html.escape(unit)}</text>')
    parts.append(f'<text x="{_WIDTH}" y="{_HEIGHT - 8}" text-anchor="end">tokens of context</text>')
    for number, curve in enumerate(curves.values()):
        color = _COLORS[number % len(_COLORS)]
        line = " ".join("{:.1f},{:.1f}".format(*at(point.x, point.value)) for point in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for point in curve:
            (x, y), (_, least), (_, most) = (
                at(point.x, value) for value in (point.value, point.low, point.high)
            )
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{least:.1f}" y2="{most:.1f}" '
                f'stroke="{color}"/>'
            )
    return _legend(curves) + "".join(parts) + "</svg>"


def _legend(names: Iterable[str]) -> str:
    items = (
        f'<span style="color:{_COLORS[number % len(_COLORS)]}">&#9632; {html.escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return f"<p>{' &nbsp; '.join(items)}</p>"


def bars(
    title: str,
    words: str,
    groups: Mapping[str, Mapping[str, float]],
    table: Sequence[Sequence[str]],
) -> str:
    """A page like ``page`` with a group of bars for each name; values from 0 to 1."""
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-size="13">']
    floor, height = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = floor - tick * height
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>')
    step = (_WIDTH - _LEFT) / max(1, len(groups))
    width = 0.7 * step / max(1, len(names))
    for number, (group, values) in enumerate(groups.items()):
        left = _LEFT + number * step + 0.15 * step
        for place, name in enumerate(names):
            if name in values:
                tall = min(1.0, values[name]) * height
                parts.append(
                    f'<rect x="{left + place * width:.1f}" y="{floor - tall:.1f}" '
                    f'width="{width * 0.9:.1f}" height="{tall:.1f}" fill="{_COLORS[place]}"/>'
                )
        middle = left + 0.35 * step
        parts.append(
            f'<text x="{middle:.1f}" y="{floor + 20}" text-anchor="middle">'
            f"{html.escape(group)}</text>"
        )
    return _page(title, words, _legend(names) + "".join(parts) + "</svg>", table)
