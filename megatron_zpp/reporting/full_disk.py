"""Keeps a full disk under the log from ending a run: lines are dropped until there is space again."""

import errno
import io
import os
import stat
import sys
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space; over the user's quota, or RLIMIT_FSIZE


def drop_lines_when_full(prog: str) -> None:
    """From here on, replace stdout and stderr where they are files, by streams that drop what does not fit.

    Once there is space again, a warning says that lines are lost. Terminals and pipes stay as they are.
    """
    for name, warning in (("stdout", " WARNING"), ("stderr", f"{prog}: warning")):  # as the other warnings
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper) and _is_file(stream):
            file = io.BufferedWriter(LogFile(stream.fileno(), warning))
            lines = stream.line_buffering or stream.write_through  # it may pass on each, as with `python -u`
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=lines))


class LogFile(io.FileIO):
    """Writes to a descriptor, which it does not close, and drops lines while its disk is full."""

    def __init__(self, descriptor: int, warning: str) -> None:
        """`warning` begins the line about lost lines."""
        super().__init__(descriptor, "wb", closefd=False)
        self._lost = False
        self._notice = f"\n{warning}: lines of this log are lost, because the disk was full\n".encode()

    def write(self, data: Any, /) -> int:
        """Write or drop `data`, which is whole lines. Raises OSError, but not for a full disk."""
        data = bytes(data)
        text = self._notice + data if self._lost else data
        try:
            while text:
                text = text[os.write(self.fileno(), text) :]
            self._lost = False
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._lost = True
        return len(data)


def _is_file(stream: io.TextIOWrapper) -> bool:
    """Whether a stream writes to a file, or to a device that is no terminal, such as /dev/full."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # closed, or without a descriptor
        return False
    return stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not stream.isatty())
