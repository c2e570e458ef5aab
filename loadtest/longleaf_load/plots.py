"""Plots as SVG, for pages without assets from elsewhere."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 620, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 15, 20, 45
COLORS = ("#1b6ca8", "#c8553d", "#588157", "#8d6a9f", "#b8860b", "#444444")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    log: bool
    start: float
    end: float

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log(v) for v in (self.low, self.high, max(value, self.low)))
            if self.log
            else (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self) -> Iterable[float]:
        if not self.log:
            return [self.low + (self.high - self.low) * n / 4 for n in range(5)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        every = [m * 10.0**n for n in range(first, last + 1) for m in (1, 2, 5)]
        found = [value for value in every if self.low <= value <= self.high]
        return found if len(found) < 10 else [v for v in found if f"{v:e}"[0] == "1"]


def plot(
    title: str,
    across: str,
    up: str,
    clouds: Mapping[str, Sequence[Point]],
    *,
    lines: bool = False,
    log_x: bool = False,
    log_y: bool = False,
    diagonal: bool = False,
) -> str:
    """Points (or lines through them) of each name. ``diagonal`` draws y = x."""
    points = [
        point
        for cloud in clouds.values()
        for point in cloud
        if (point[0] > 0 or not log_x) and (point[1] > 0 or not log_y)
    ]
    if not points:
        return _figure(title, "<p>Nothing to show.</p>", ())
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_axis = _Axis(min(xs) if log_x else 0.0, max(xs) * 1.02, log_x, _LEFT, WIDTH - _RIGHT)
    y_low = min(ys) * 0.8 if log_y else 0.0
    y_axis = _Axis(y_low, max(ys) * 1.1 or 1.0, log_y, HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(x_axis, y_axis, across, up)]
    if diagonal:
        end = min(x_axis.high, y_axis.high)
        parts.append(
            f'<line x1="{x_axis.at(0):.1f}" y1="{y_axis.at(0):.1f}" x2="{x_axis.at(end):.1f}" '
            f'y2="{y_axis.at(end):.1f}" stroke="#bbb" stroke-dasharray="4 4"/>'
        )
    for number, cloud in enumerate(clouds.values()):
        color = COLORS[number % len(COLORS)]
        placed = [(x_axis.at(x), y_axis.at(y)) for x, y in cloud if y > 0 or not log_y]
        if lines:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
            )
        size = 4 if lines else 2.2
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{color}" fill-opacity="0.6"/>'
            for x, y in placed
        ]
    return _figure(title, _svg(parts), clouds)


def stacked(title: str, up: str, bars: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """A bar for each label, made of the named parts; labels may be equal."""
    names = list(dict.fromkeys(part for _, parts in bars for part in parts))
    top = max((sum(parts.values()) for _, parts in bars), default=0.0)
    if not top:
        return _figure(title, "<p>None.</p>", ())
    y_axis = _Axis(0.0, top * 1.1, False, HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(None, y_axis, "", up)]
    step = (WIDTH - _LEFT - _RIGHT) / len(bars)
    for place, (label, values) in enumerate(bars):
        left, sum_ = _LEFT + step * (place + 0.2), 0.0
        for name, value in values.items():
            y, below = y_axis.at(sum_ + value), y_axis.at(sum_)
            color = COLORS[names.index(name) % len(COLORS)]
            parts.append(
                f'<rect x="{left:.1f}" y="{y:.1f}" width="{step * 0.6:.1f}" '
                f'height="{below - y:.1f}" fill="{color}"/>'
            )
            sum_ += value
        parts.append(
            f'<text x="{left + step * 0.3:.1f}" y="{HEIGHT - _BOTTOM + 18}" '
            f'text-anchor="middle">{html.escape(label)}</text>'
        )
    return _figure(title, _svg(parts), names)


def _frame(x_axis: _Axis | None, y_axis: _Axis, across: str, up: str) -> str:
    parts = []
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    for value in x_axis.ticks() if x_axis else ():
        x = x_axis.at(value) if x_axis else 0.0
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
            f"{_short(value)}</text>"
        )
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 7}">{html.escape(up)}</text>')
    parts.append(
        f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 8}" text-anchor="end">'
        f"{html.escape(across)}</text>"
    )
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value / 1e3:g}k" if value >= 1e3 else f"{value:.3g}"


def _svg(parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="12">{"".join(parts)}</svg>'


def _figure(title: str, body: str, names: Iterable[str]) -> str:
    legend = " &nbsp; ".join(
        f'<span style="color:{COLORS[number % len(COLORS)]}">&#9632; {html.escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return f"<figure><h3>{html.escape(title)}</h3><p>{legend}</p>{body}</figure>"
