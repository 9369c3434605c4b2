"""How every program ends: an error is one line on stderr; a broken pipe and Ctrl-C print no traceback."""

import os
import signal
import sys
import traceback
from collections.abc import Callable

from megatron_zpp.config.options import UsageError

INTERRUPTED = 130  # the shell's status for a program stopped by Ctrl-C


def run_tool(prog: str, main: Callable[[], None]) -> None:
    """Run `main`; exit with 1 after an error, 2 for a bad command line, 130 if interrupted.

    Errors that the user can fix (ValueError, OSError, a missing package) are shortened to one line. Any other
    exception is a bug and keeps its traceback.
    """
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
        sys.exit(0)
    except UsageError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if os.environ.get("MEGATRON_ZPP_DEBUG"):
            traceback.print_exc()
        print(f"{prog}: error: {one_line(error)}", file=sys.stderr)
        sys.exit(1)


def unwind_on_sigterm() -> None:
    """Make SIGTERM exit through every `with` and `finally`, with the shell's status for it, 143."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def one_line(error: BaseException) -> str:
    """Return the error's message on a single line, with its type unless the error is a ValueError."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = " ".join(str(error).split())
    return message if isinstance(error, ValueError) and message else f"{type(error).__name__}: {message}"
