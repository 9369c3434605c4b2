"""Colours for lines on a terminal. Files and pipes get the same text without them."""

import os
import re
from collections.abc import Mapping


def wants_colour(terminal: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether what is written to a `terminal` or another file gets colours.

    A terminal gets them unless it cannot show them, or NO_COLOR (https://no-color.org) is not empty.
    """
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM", "") != "dumb"


def paint_message(line: str) -> str:
    """A line with `error:` in red and `warning:` or `WARNING:` in yellow, by the sequences of ECMA-48."""
    line = re.sub(r"\berror:", "\x1b[1;31merror:\x1b[0m", line, count=1)
    return re.sub(r"\b(warning|WARNING):", "\x1b[33m\\g<0>\x1b[0m", line, count=1)
