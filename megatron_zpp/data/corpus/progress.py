"""Shows the progress of a long step: a bar on a terminal, otherwise a line from time to time."""

import sys
import time
from typing import TextIO

from tqdm import tqdm


class Progress:
    """Counts bytes and documents, and shows rates and the remaining time on stderr.

    `total_bytes` is the size of the input on disk, None if unknown; `every` is the number of documents
    between lines if stderr is not a terminal. Use it in a `with` block.
    """

    def __init__(self, step: str, total_bytes: int | None, every: int, stream: TextIO | None = None) -> None:
        self.documents = self.text_bytes = self.disk_bytes = 0
        self._step, self._total, self._every = step, total_bytes, every
        self._stream = stream or sys.stderr
        self._start = time.monotonic()
        self._next_line = every
        self._bar = None
        if self._stream.isatty():
            share = "{percentage:3.0f}%|{bar}| " if total_bytes else ""
            layout = "{desc}: " + share + "{elapsed}{postfix}"
            self._bar = tqdm(desc=step, total=total_bytes, file=self._stream, bar_format=layout)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, *, disk_bytes: int, text_bytes: int, documents: int) -> None:
        """Add finished work: bytes of the input as stored on disk, bytes of text, documents."""
        self.disk_bytes += disk_bytes
        self.text_bytes += text_bytes
        self.documents += documents
        if self._bar is not None:
            self._bar.set_postfix_str(self._state(), refresh=False)
            self._bar.update(disk_bytes)
        elif self.documents >= self._next_line:
            self._next_line = (self.documents // self._every + 1) * self._every
            self.say(f"{self._step}: {self.documents:,} documents, {self._state()}")

    def say(self, line: str) -> None:
        """Write a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return max(time.monotonic() - self._start, 1e-9)

    def rates(self) -> str:
        """Return, for example, `3.61 MB/s, 212 documents/s`; MB is 10^6 bytes of text."""
        seconds = self.seconds()
        return f"{self.text_bytes / seconds / 1e6:.2f} MB/s, {self.documents / seconds:,.0f} documents/s"

    def _state(self) -> str:
        if not self._total or not self.disk_bytes:
            return self.rates()
        left = max(self._total - self.disk_bytes, 0) / self.disk_bytes * self.seconds()
        return f"{self.rates()}, {tqdm.format_interval(left)} left"
