"""Charts as SVG text, without other packages, for pages that need no network.

Colours are CSS variables of the page: --series-0 … --series-5 for curves, --grid, --text, --muted.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_zpp.reporting.report.curves import Curve

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 38
_MOST_TICKS = 6
_MOST_POINTS = 600  # of a curve: more than the pixels of a chart


@dataclass(frozen=True)
class _Scale:
    """Maps values to pixels."""

    low: float
    high: float
    first: float  # pixel of `low`
    last: float

    def __call__(self, value: float) -> float:
        return self.first + (self.last - self.first) * (value - self.low) / (self.high - self.low)


def chart(curves: Mapping[str, Curve], *, title: str, x_label: str) -> str:
    """A figure with its title and its curves by their names; empty if no point is finite."""
    shown = {name: points for name, each in curves.items() if (points := _usable(each))}
    if not shown:
        return ""
    x, y = _scales(list(shown.values()))
    parts = _axes(x, y, x_label)
    for colour, points in enumerate(shown.values()):
        places = [(round(x(a), 1), round(y(b), 1)) for a, b in points]
        joined = " ".join(f"{a},{b}" for a, b in places)
        parts.append(f'<polyline class="series s{colour}" points="{joined}"/>')
        if len(places) == 1:
            parts.append('<circle class="s{}" cx="{}" cy="{}" r="3"/>'.format(colour, *places[0]))
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}{_legend(list(shown))}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title, quote=True)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def nice_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at most _MOST_TICKS."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / _MOST_TICKS))
    step = next(step * factor for factor in (1, 2, 5, 10, 20) if span / (step * factor) < _MOST_TICKS)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number in a few characters: 1.5 M, 0.0003, 42."""
    size = abs(value)
    for factor, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if size >= factor:
            return f"{value / (1e3 if name == ' k' else factor):.4g}{name}"
    return f"{value:.4g}"


def _usable(curve: Curve) -> list[tuple[float, float]]:
    """The finite points of a curve; of more than _MOST_POINTS the least and the most of each stretch."""
    pairs = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
    if len(pairs) <= _MOST_POINTS:
        return pairs
    stretch = math.ceil(2 * len(pairs) / _MOST_POINTS)
    kept = []
    for first in range(0, len(pairs), stretch):
        part = pairs[first : first + stretch]
        kept += sorted({min(part, key=lambda pair: pair[1]), max(part, key=lambda pair: pair[1])})
    return kept


def _scales(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[_Scale, _Scale]:
    """Those of both axes. All points fit, and 0 is the lower end where it would be just below it."""
    xs, ys = zip(*(pair for points in curves for pair in points), strict=True)
    low, high = min(ys), max(ys)
    margin = 0.05 * (high - low) or (abs(low) or 1) / 2
    low, high = (0.0 if low - margin < 0 <= low else low - margin), high + margin
    first, last = min(xs), max(xs)
    across = _Scale(first, last if last > first else first + 1, _LEFT, WIDTH - _RIGHT)
    return across, _Scale(low, high, HEIGHT - _BOTTOM, _TOP)


def _axes(x: _Scale, y: _Scale, x_label: str) -> list[str]:
    parts = []
    for tick in nice_ticks(y.low, y.high):
        at = y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in nice_ticks(x.low, x.high):
        parts.append(
            f'<text x="{x(tick):.1f}" y="{HEIGHT - _BOTTOM + 17}" text-anchor="middle">{short(tick)}</text>'
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{x_label}</text>')
    return parts


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    keys = "".join(
        f'<span class="key k{colour}">{html.escape(name)}</span>' for colour, name in enumerate(names)
    )
    return f'<span class="legend">{keys}</span>'
