"""Charts as SVG text inside a page, drawn by matplotlib.

Colours are CSS variables of the page: --series-0 … --series-5 for curves, --grid and --muted for the rest.
"""

import html
import math
import re
from collections.abc import Mapping
from io import StringIO

from megatron_zpp.reporting.report.curves import Curve

_SIZE = (5.8, 2.6)  # inches of 72 pixels
_SERIES = tuple(f"#01010{number}" for number in range(6))  # stand for variables until the SVG is text
_GRID, _MUTED = "#010106", "#010107"
_VARIABLES = (*(f"--series-{number}" for number in range(6)), "--grid", "--muted")
_IDS = re.compile(r' id="\w+_\d+"')  # of parts, which are the same in all charts of a page
_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # none


def chart(curves: Mapping[str, Curve], *, title: str, x_label: str) -> str:
    """A figure with its title and its curves by their names; empty if no point is finite."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = {name: each for name, each in curves.items() if any(map(math.isfinite, each.y))}
    if not shown:
        return ""
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _MUTED)
    colours |= dict.fromkeys(("axes.edgecolor", "grid.color"), _GRID)
    with rc_context({"svg.fonttype": "none", "font.size": 8, **colours}):
        figure = Figure(_SIZE, layout="constrained")
        axes = figure.subplots()
        for colour, (name, each) in zip(_SERIES, shown.items(), strict=False):
            axes.plot(each.x, each.y, "-" if len(each.x) > 1 else "o", color=colour, label=name)
        axes.set_xlabel(x_label)
        axes.grid()
        if len(shown) > 1:
            axes.legend(frameon=False)
        written = StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata=_METADATA)
    parts = _IDS.sub("", written.getvalue().partition("<svg")[2].partition(">")[2])
    for colour, variable in zip((*_SERIES, _GRID, _MUTED), _VARIABLES, strict=True):
        parts = parts.replace(colour, f"var({variable})")
    width, height = (72 * inches for inches in _SIZE)
    label = html.escape(title)
    return (
        f'<figure class="chart"><figcaption>{label}</figcaption>'
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{label}">{parts}</figure>'
    )


def short(value: float) -> str:
    """A number in a few characters: 1.5 M, 0.0003, 42."""
    size = abs(value)
    for factor, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if size >= factor:
            return f"{value / (1e3 if name == ' k' else factor):.4g}{name}"
    return f"{value:.4g}"
