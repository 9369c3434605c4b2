"""Keeps a full disk under the log from ending a run: lines are dropped until there is space again."""

import errno
import io
import os
import stat
import sys
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)  # no space on the file system; over the user's quota


def drop_lines_when_full(prog: str) -> None:
    """From here on, replace stdout and stderr where they are files, by streams that drop what does not fit.

    Once there is space again, a warning says how many lines are lost. Terminals and pipes stay as they are.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and _is_file(sys.stdout):
        sys.stdout = _stream(sys.stdout, " WARNING")  # as the other warnings in the log
    if isinstance(sys.stderr, io.TextIOWrapper) and _is_file(sys.stderr):
        sys.stderr = _stream(sys.stderr, f"{prog}: warning")


class LogFile(io.RawIOBase):
    """Writes to a descriptor, and drops lines while its disk is full."""

    def __init__(self, descriptor: int, warning: str) -> None:
        """`warning` begins the line about lost lines."""
        self._descriptor, self._warning = descriptor, warning
        self._lost = 0  # lines since the last one that was written
        self._cut = False  # whether the file ends within a line

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any, /) -> int:
        """Write or drop `data`, which is whole lines. Raises OSError, but not for a full disk."""
        text = lost = bytes(data)
        if self._lost == 0 or not self._put(self._notice()):
            self._lost, lost = 0, self._put(text)
        self._lost += lost.count(b"\n") + (lost != b"" and not lost.endswith(b"\n"))
        return len(text)

    def _notice(self) -> bytes:
        lines = "1 line of this log is" if self._lost == 1 else f"{self._lost} lines of this log are"
        end = "\n" if self._cut else ""
        return f"{end}{self._warning}: {lines} lost, because the disk was full\n".encode()

    def _put(self, text: bytes) -> bytes:
        """Write `text`, and return the rest of it for which the disk has no space."""
        while text:
            try:
                count = os.write(self._descriptor, text)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                break
            self._cut = text[:count][-1:] != b"\n"
            text = text[count:]
        return text


def _is_file(stream: io.TextIOWrapper) -> bool:
    """Whether a stream writes to a file, or to a device that is no terminal, such as /dev/full."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # closed, or without a descriptor
        return False
    return stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not stream.isatty())


def _stream(stream: io.TextIOWrapper, warning: str) -> io.TextIOWrapper:
    """A stream in place of `stream`; it passes each line on if that one does, as with `python -u`."""
    lines = stream.line_buffering or stream.write_through
    raw = LogFile(stream.fileno(), warning)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=lines
    )
