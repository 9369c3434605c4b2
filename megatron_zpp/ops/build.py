"""Build csrc/ once per version of the sources, torch, compilers and processor.

    python -m megatron_zpp.ops.build [--verbose]
    python -m megatron_zpp.ops.build --check-device-code   # compiles the .cu files and keeps nothing

The library is saved in the directory MEGATRON_ZPP_CACHE, by default megatron_zpp in XDG_CACHE_HOME or
~/.cache. A run builds it at first use, and this command builds it beforehand. CXX and CUDA_HOME select other
compilers.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_zpp.config.command_line import command_options, program_name, run_tool
from megatron_zpp.config.options import Options, option
from megatron_zpp.native.cache import EVERY_SECONDS, BuildError, build_once, cache_directory
from megatron_zpp.ops.toolchain import (
    SOURCES,
    Command,
    Toolchain,
    build_key,
    check_commands,
    find_nvcc,
    find_toolchain,
    library_commands,
    ninja_text,
)

LIBRARY = "megatron_zpp.so"
WAIT_SECONDS = 900.0  # several times the duration of a build on two slow cores
SHOWN_LINES = 25


def build(
    *,
    say: Callable[[str], None],
    verbose: bool = False,
    wait_seconds: float = WAIT_SECONDS,
    every_seconds: float = EVERY_SECONDS,
    sources: Path = SOURCES,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Return the library of `sources`, and build it first if it is missing.

    `say` is called when a build begins, and with its progress every `every_seconds`. Processes that call this
    at the same time wait for the first, at most `wait_seconds`. Raises BuildError.
    """
    tools = find_toolchain(environ)
    commands = library_commands(tools, sources, LIBRARY)
    library = cache_directory(environ) / f"{build_key(tools, sources, commands)}.so"

    def make(made: Path) -> None:
        cuda = f" and CUDA {tools.nvcc_version}" if tools.nvcc else ""
        say(f"building the kernels with {tools.cxx_version}{cuda}, once; {library}")
        _compile(tools, commands, made.parent, library.with_suffix(".log"), say, verbose, every_seconds)
        (made.parent / LIBRARY).rename(made)

    return build_once(library, make, say, wait_seconds=wait_seconds, every_seconds=every_seconds)


def check_device_code(
    say: Callable[[str], None],
    *,
    verbose: bool = False,
    sources: Path = SOURCES,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Compile the .cu files for every kind of GPU that nvcc knows, which needs none. Raises BuildError."""
    nvcc = find_nvcc(environ)
    if nvcc is None:
        say("csrc: nvcc is not installed; device code was not compiled")
        return
    tools = find_toolchain(environ)
    commands, architectures = check_commands(nvcc, tools.cxx, sources)
    with tempfile.TemporaryDirectory() as directory:
        _compile(tools, commands, Path(directory), Path(directory) / "log", say, verbose, EVERY_SECONDS)
    kinds = ", ".join(f"{each[:-1]}.{each[-1]}" for each in architectures)
    say(f"csrc: {nvcc} compiles {len(commands)} files of device code for compute capabilities {kinds}")


def _compile(
    tools: Toolchain,
    commands: list[Command],
    directory: Path,
    log: Path,
    say: Callable[[str], None],
    verbose: bool,
    every_seconds: float,
) -> None:
    """Run the commands in `directory`, one per core at a time, with their output in `log`."""
    (directory / "build.ninja").write_text(ninja_text(commands))
    argv = [tools.ninja, "-C", str(directory), "-v", f"-j{len(os.sched_getaffinity(0))}"]
    done, lines = "0", []
    with (
        _shown(lambda: f"{done} of {len(commands)} files done", say, every_seconds),
        log.open("w") as file,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()
            lines.append(line.rstrip())
            if found := re.match(r"\[(\d+)/\d+\]", line):  # [DONE/TOTAL], when a command is done
                done = found[1]
            if verbose:
                say(lines[-1])
    if process.returncode:
        shown = "\n".join(lines[-SHOWN_LINES:])
        raise BuildError(f"the kernels do not compile; the whole output is in {log}, its end is:\n{shown}")


@contextmanager
def _shown(progress: Callable[[], str], say: Callable[[str], None], every: float) -> Iterator[None]:
    """Call `say` with the progress of the block every `every` seconds, and with the time that it took."""
    started, ended = time.monotonic(), threading.Event()

    def work() -> None:
        while not ended.wait(every):
            say(f"compiling the kernels: {progress()}, {time.monotonic() - started:.0f} s so far")

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if time.monotonic() - started > every:
        say(f"built the kernels in {time.monotonic() - started:.0f} s")


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """kernels"""

    verbose: bool = option(False, "Show the compilers' command lines and output.")
    check_device_code: bool = option(False, "Only compile the .cu files, which needs no GPU; keep nothing.")


def main() -> None:
    settings = command_options(Settings, __doc__)
    say = partial(print, flush=True)
    try:
        if settings.check_device_code:
            check_device_code(say, verbose=settings.verbose)
        else:
            say(str(build(say=say, verbose=settings.verbose)))
    except BuildError as error:
        sys.exit(f"{program_name()}: error: {error}")  # run_tool would join the compiler's lines


if __name__ == "__main__":
    run_tool(main)
