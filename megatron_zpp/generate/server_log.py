"""What the server says on its terminal: a line for each request and for each client without HTTP.

A terminal that is closed, or a full disk under a log, costs lines and never a request.
"""

import contextlib
import logging
import sys
import time
import traceback
from typing import TextIO

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import printable


def say(line: str) -> None:
    """Print a line at once; drop it if nobody can read it."""
    _write(sys.stdout, f"{line}\n")


def say_failure(line: str) -> None:
    """Print a line on stderr at once; drop it if nobody can read it."""
    _write(sys.stderr, f"{line}\n")


def say_traceback() -> None:
    """Print the traceback of the exception that is handled; drop it if nobody can read it."""
    _write(sys.stderr, traceback.format_exc())


def say_request(client: str | None, texts: int, tokens: int, seconds: float) -> None:
    """Print the line of a request that was answered."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S")
    say(f"[{clock}] {client}: {texts} texts, up to {tokens} tokens each, {seconds:.2f} s")


class OneLine(logging.Handler):
    """Prints aiohttp's messages about clients that do not speak HTTP, without tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        why = f": {one_line(error)}" if error is not None else ""
        say(f"{record.getMessage()}{why}")


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # the program was started without it
        return
    with contextlib.suppress(OSError):  # BrokenPipeError would look like a client that left
        stream.write(printable(text))
        stream.flush()
