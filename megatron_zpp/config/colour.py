"""Colours for lines on a terminal. Files and pipes get the same text without them."""

import os
import re
from collections.abc import Mapping
from enum import Enum

CLEAR_LINE = "\r\x1b[K"  # removes a bar or a status from the line before text is written to it


class Style(Enum):
    """SGR parameters of ECMA-48."""

    BOLD = "1"
    DIM = "2"
    RED = "1;31"
    GREEN = "1;32"
    YELLOW = "33"
    CYAN = "36"


def wants_colour(terminal: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether what is written to a `terminal` or another file gets colours.

    A terminal gets them unless it cannot show them, or NO_COLOR (https://no-color.org) is not empty.
    """
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM", "") != "dumb"


def paint(text: str, style: Style) -> str:
    """`text` in a style, back to normal after it."""
    return f"\x1b[{style.value}m{text}\x1b[0m"


def paint_message(line: str) -> str:
    """A line with `error:` in red and `warning:` or `WARNING:` in yellow."""
    line = re.sub(r"\berror:", lambda found: paint(found[0], Style.RED), line, count=1)
    return re.sub(r"\b(warning|WARNING):", lambda found: paint(found[0], Style.YELLOW), line, count=1)


def paint_log_line(line: str) -> str:
    """Megatron-LM's log line: names dim, the iteration bold, the loss green, counts of bad iterations red."""
    text, end = (line[:-2], paint(" |", Style.DIM)) if line.endswith(" |") else (line, "")
    return paint(" | ", Style.DIM).join(map(_paint_part, text.split(" | "))) + end


def _paint_part(part: str) -> str:
    name, colon, value = part.rpartition(": ")
    if not colon:  # the time and the iteration
        return paint(part, Style.BOLD)
    bare = value.strip().lower()
    style = None
    if name.endswith("loss") or name.startswith("lm loss"):
        style = Style.RED if bare in ("nan", "inf", "-inf") else Style.GREEN
    elif name.startswith("number of") and bare != "0":
        style = Style.RED
    elif name == "grad norm" and bare in ("nan", "inf"):
        style = Style.YELLOW
    return paint(f"{name}: ", Style.DIM) + (paint(value, style) if style else value)
