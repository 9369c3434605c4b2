"""What the server says on its terminal: a line for each request and for each client without HTTP."""

import logging
import sys
import time

from megatron_zpp.config.command_line import one_line


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


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
