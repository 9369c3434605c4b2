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
class Series:
    """A curve and how it is drawn."""

    name: str
    curve: Curve
    dots: bool = False
    colour: int = 0


@dataclass(frozen=True)
class _Scale:
    """Maps values to pixels; logarithmic scales map the logarithm."""

    low: float
    high: float
    first: float  # pixel of `low`
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = ((math.log10(each) if self.log else each) for each in (self.low, self.high, value))
        return self.first + (self.last - self.first) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        if not self.log:
            return nice_ticks(self.low, self.high)
        decades = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        if len(decades) < 2:
            return [tick for tick in nice_ticks(self.low, self.high) if tick > 0]
        return [10.0**decade for decade in decades]


def chart(series: Sequence[Series], *, title: str, x_label: str, log_y: bool = False) -> str:
    """A figure with its title, the names of its curves, and the curves; empty if there are no points.

    On a logarithmic axis values that are not positive are left out.
    """
    series = [_usable(each, log_y) for each in series]
    series = [each for each in series if each.curve.x]
    if not series:
        return ""
    x, y = _scales(series, log_y)
    parts = _axes(x, y, x_label)
    for each in series:
        places = [(round(x(a), 1), round(y(b), 1)) for a, b in zip(each.curve.x, each.curve.y, strict=True)]
        parts.append(_drawn(each, places))
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}{_legend(series)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title, quote=True)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def bars(lengths: Mapping[str, float], *, title: str, unit: str) -> str:
    """A figure with a bar for each of `lengths`, which has its name."""
    height, left = 25, 190
    scale = (2 * WIDTH - left - 90) / max(*lengths.values(), 1e-9)
    parts = []
    for index, (name, length) in enumerate(lengths.items()):
        top = index * height + 4
        width = max(1.0, length * scale)
        parts.append(
            f'<text x="{left - 8}" y="{top + 13}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect class="bar" x="{left}" y="{top}" width="{width:.1f}" height="18" rx="2"/>'
            f'<text class="value" x="{left + width + 5:.1f}" y="{top + 13}">{short(length)} {unit}</text>'
        )
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {2 * WIDTH} {len(lengths) * height + 8}" role="img">{"".join(parts)}</svg>'
        "</figure>"
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


def _usable(series: Series, log_y: bool) -> Series:
    pairs = zip(series.curve.x, series.curve.y, strict=True)
    kept = [(x, y) for x, y in pairs if math.isfinite(y) and (y > 0 or not log_y)]
    kept = _thinned(kept)
    curve = Curve([x for x, _ in kept], [y for _, y in kept])
    return Series(series.name, curve, series.dots, series.colour)


def _thinned(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most _MOST_POINTS, with the least and the most of each stretch, so that no spike is lost."""
    if len(pairs) <= _MOST_POINTS:
        return pairs
    stretch = math.ceil(2 * len(pairs) / _MOST_POINTS)
    kept = []
    for first in range(0, len(pairs), stretch):
        part = pairs[first : first + stretch]
        kept += sorted({min(part, key=lambda pair: pair[1]), max(part, key=lambda pair: pair[1])})
    return kept


def _scales(series: Sequence[Series], log_y: bool) -> tuple[_Scale, _Scale]:
    xs = [x for each in series for x in each.curve.x]
    ys = [y for each in series for y in each.curve.y]
    low, high = min(ys), max(ys)
    if low == high:
        low, high = (low / 2, high * 2) if log_y else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
    elif log_y:
        low, high = low / (high / low) ** 0.04, high * (high / low) ** 0.04
    else:
        low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
        low = 0.0 if low < 0 <= min(ys) else low
    first, last = min(xs), max(xs)
    last = last if last > first else first + 1
    across = _Scale(first, last, _LEFT, WIDTH - _RIGHT)
    return across, _Scale(low, high, HEIGHT - _BOTTOM, _TOP, log_y)


def _axes(x: _Scale, y: _Scale, x_label: str) -> list[str]:
    parts = []
    for tick in y.ticks():
        at = y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in x.ticks():
        parts.append(
            f'<text x="{x(tick):.1f}" y="{HEIGHT - _BOTTOM + 17}" text-anchor="middle">{short(tick)}</text>'
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{x_label}</text>')
    return parts


def _drawn(series: Series, places: list[tuple[float, float]]) -> str:
    line = f'<polyline class="series s{series.colour}" points="{" ".join(f"{a},{b}" for a, b in places)}"/>'
    if len(places) == 1 or (series.dots and len(places) <= 60):
        line += "".join(f'<circle class="s{series.colour}" cx="{a}" cy="{b}" r="3"/>' for a, b in places)
    return line


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    keys = "".join(f'<span class="key k{each.colour}">{html.escape(each.name)}</span>' for each in series)
    return f'<span class="legend">{keys}</span>'
