"""Shows the progress of a long step: one line on a terminal, otherwise a line from time to time."""

import sys
import time

from megatron_zpp.config.words import duration

_CLEAR = "\r\x1b[K"  # the line of a terminal


class Progress:
    """Counts bytes and documents, and shows rates and the remaining time on stderr.

    `total_bytes` is the size of the input on disk; `every` is the number of documents between lines if stderr
    is not a terminal. Use it in a `with` block.
    """

    def __init__(self, step: str, total_bytes: int, every: int) -> None:
        self.documents = self.text_bytes = self.disk_bytes = 0
        self._step, self._total, self._every = step, total_bytes, every
        self._start = time.monotonic()
        self._next_line = every
        self._clear = _CLEAR if sys.stderr.isatty() else ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._clear and self.documents:
            self._write("\n")

    def advance(self, *, disk_bytes: int, text_bytes: int, documents: int) -> None:
        """Add finished work: bytes of the input as stored on disk, bytes of text, documents."""
        self.disk_bytes += disk_bytes
        self.text_bytes += text_bytes
        self.documents += documents
        share = self.disk_bytes / self._total if self._total else 1.0
        line = f"{self._step}: {self.documents:,} documents, {self.rates()}"
        if share:
            line += f", {duration(max(1 / share - 1, 0) * self.seconds())} left"
        if self._clear:
            self._write(self._clear + line)
        elif self.documents >= self._next_line:
            self._next_line = (self.documents // self._every + 1) * self._every
            self.say(line)

    def say(self, line: str) -> None:
        """Write a line above that of the progress."""
        self._write(f"{self._clear}{line}\n")

    def seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def rates(self) -> str:
        """Return, for example, `3.61 MB/s, 212 documents/s`; MB is 10^6 bytes of text."""
        seconds = self.seconds()
        return f"{self.text_bytes / seconds / 1e6:.2f} MB/s, {self.documents / seconds:,.0f} documents/s"

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
