"""How every program ends: an error is one line on stderr; a broken pipe and Ctrl-C print no traceback."""

import io
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron_zpp.config.options import Options, UsageError, make_parser, parse_known, printable
from megatron_zpp.config.sources.provided import Provided

DEBUG = "MEGATRON_ZPP_DEBUG"  # in the environment: errors have their traceback
INTERRUPTED = 130  # the shell's status for a program stopped by Ctrl-C
_Result = TypeVar("_Result")


def program_name() -> str:
    """Return the program as the user typed it: `megatron-zpp train`, `pretrain_gpt.py`, `python -m MODULE`.

    commands/scripts.py puts the name of a command into sys.argv[0].
    """
    program = sys.modules["__main__"]
    if program.__spec__ is not None and sys.argv[0] == program.__file__:  # of python -m
        return f"python -m {program.__spec__.name.removesuffix('.__main__')}"
    return os.path.basename(sys.argv[0])


def command_groups(
    groups: Mapping[str, type[Options]], description: str, argv: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the flags of this program's command line, or of `argv`, by group.

    Raises UsageError if it is wrong.
    """
    parser = make_parser(program_name(), description, groups)
    provided = Provided(groups, *parse_known(parser, groups, sys.argv[1:] if argv is None else argv))
    made = provided.made(groups)
    provided.check_refused()
    return made


def command_options(cls: type[Options], description: str) -> Any:
    """As `command_groups`, of a program with one class of flags."""
    return command_groups({"options": cls}, description)["options"]


def run_tool(main: Callable[[], _Result]) -> _Result:
    """Return what `main` does; exit with 1 after an error, 2 for a bad command line, 130 if interrupted.

    Errors that the user can fix (ValueError, OSError, a missing package) are shortened to one line. Any other
    exception is a bug and keeps its traceback.
    """
    prog = program_name()
    take_any_text()
    try:
        result = main()
        sys.stdout.flush()
        return result
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
        sys.exit(0)
    except UsageError as error:
        end_with_usage_error(prog, str(error))
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        _print_error(prog, one_line(error))
        sys.exit(1)


def take_any_text() -> None:
    """Let stdout and stderr escape what their encoding lacks, such as ×, and drop all if they are closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # a program may be started without it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", closefd=False))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def end_with_usage_error(prog: str, message: str) -> NoReturn:
    """Say that the command line is wrong, and exit with 2."""
    _print_error(prog, message)
    sys.exit(2)


def _print_error(prog: str, message: str) -> None:
    print(message_line(f"{prog}: error: {message}", sys.stderr.isatty()), file=sys.stderr)


def wants_colour(terminal: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether what is written to a `terminal` or another file gets colours.

    A terminal gets them unless it cannot show them, or NO_COLOR (https://no-color.org) is not empty.
    """
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM", "") != "dumb"


def message_line(line: str, terminal: bool) -> str:
    """A line for a `terminal` or another file, with its control characters escaped.

    In colours, by the sequences of ECMA-48, `error:` is red and `warning:` or `WARNING:` is yellow.
    """
    line = printable(line)
    if not wants_colour(terminal):
        return line
    line = re.sub(r"\berror:", "\x1b[1;31merror:\x1b[0m", line, count=1)
    return re.sub(r"\b(warning|WARNING):", "\x1b[33m\\g<0>\x1b[0m", line, count=1)


def check_packages(prog: str, *names: str) -> None:
    """End with a hint if one of these packages is missing, as without the environment that has them."""
    if all(find_spec(name) for name in names):
        return
    missing = ", ".join(name for name in names if not find_spec(name))
    root = Path(__file__).resolve().parents[2]
    environment = root / ".venv"
    if (environment / "bin" / "python").exists() and Path(sys.prefix).resolve() != environment.resolve():
        hint = f"activate the environment: source {shlex.quote(str(environment / 'bin' / 'activate'))}"
    else:
        hint = f"install them: {root}/launch/setup_venv.sh requirements.txt, then source .venv/bin/activate"
    _print_error(prog, f"{sys.executable} has no {missing}; {hint}")
    sys.exit(1)


def unwind_on_sigterm() -> None:
    """Make SIGTERM exit through every `with` and `finally`, with the shell's status for it, 143."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def one_line(error: BaseException) -> str:
    """Return the error's message on a single line, with its type unless it is a ValueError or one of ours."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = " ".join(str(error).split())
    says_all = isinstance(error, ValueError) or type(error).__module__.startswith("megatron_zpp.")
    return message if says_all and message else f"{type(error).__name__}: {message}"
