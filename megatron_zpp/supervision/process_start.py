"""When this process started, before it imported anything."""

import os
from pathlib import Path


def process_started() -> float:
    """The start of this process in seconds on CLOCK_BOOTTIME. Raises OSError if that is unknown."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # proc(5): starttime
    if ticks == 0:
        raise OSError("/proc/self/stat has no starttime")
    return ticks / os.sysconf("SC_CLK_TCK")
