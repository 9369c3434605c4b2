"""Build csrc/ once per version of the sources, torch, compilers and processor.

    python -m megatron_zpp.ops.build [--verbose] [--force]
    python -m megatron_zpp.ops.build --check-device-code   # compiles the .cu files and keeps nothing

The library is saved in the directory MEGATRON_ZPP_CACHE, by default megatron_zpp in XDG_CACHE_HOME or
~/.cache. A run builds it at first use, and this command builds it beforehand. A library is loaded only if its
SHA-256 equals the one saved with it. CXX and CUDA_HOME select other compilers.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.options import Options, option, option_error, parse_options
from megatron_zpp.native.cache import (
    PRIVATE_UMASK,
    BuildError,
    building_directory,
    cache_directory,
    locked,
    open_private,
)
from megatron_zpp.native.library_file import install, problem_of
from megatron_zpp.native.progress import EVERY_SECONDS, shown
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
    force: bool = False,
    wait_seconds: float = WAIT_SECONDS,
    every_seconds: float = EVERY_SECONDS,
    sources: Path = SOURCES,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Return the library of `sources`, and build it first if it is missing or damaged, or with `force`.

    `say` is called when a build begins, and with its progress every `every_seconds`. Processes that call this
    at the same time wait for the first, at most `wait_seconds`. Raises BuildError.
    """
    tools = find_toolchain(environ)
    commands = library_commands(tools, sources, LIBRARY)
    key = build_key(tools, sources, commands)
    cache = cache_directory(environ)
    library = cache / f"{key}.so"
    if not force and problem_of(library) is None:
        return library
    lock, is_built = cache / f"{key}.lock", None if force else lambda: problem_of(library) is None
    with locked(lock, say, wait_seconds, every_seconds, is_built) as held:
        if not held:
            return library
        problem = problem_of(library)
        if problem is None and not force:
            return library
        again = f"again: {problem}" if problem and library.exists() else "once"
        say(f"building the kernels with {_names(tools)}, {again}; {library}")
        for abandoned in cache.glob(f"{key}.building-*"):
            shutil.rmtree(abandoned, ignore_errors=True)  # its builder is dead, because we hold the lock
        with building_directory(cache, key) as directory:
            compiled = _Compiled(len(commands))
            with shown(say, compiled.describe, "built the kernels", every_seconds):
                log = cache / f"{key}.log"
                _run_ninja(
                    tools.ninja, commands, directory, log, compiled.next_line, say if verbose else None
                )
            install(directory / LIBRARY, library)
    return library


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
        log = Path(directory) / "log"
        compiled = _Compiled(len(commands))
        with shown(say, compiled.describe, "compiled them"):
            _run_ninja(
                tools.ninja, commands, Path(directory), log, compiled.next_line, say if verbose else None
            )
    kinds = ", ".join(f"{each[:-1]}.{each[-1]}" for each in architectures)
    say(f"csrc: {nvcc} compiles {len(commands)} files of device code for compute capabilities {kinds}")


@dataclass
class _Compiled:
    """How many of a build's commands are done, as ninja says it."""

    total: int
    done: int = 0

    def next_line(self, line: str) -> None:
        """Take note of a line of ninja's output, which begins with [DONE/TOTAL] when a command is done."""
        if found := re.match(r"\[(\d+)/\d+\]", line):
            self.done = int(found[1])

    def describe(self) -> str:
        return f"compiling the kernels: {self.done} of {self.total} files done"


def _run_ninja(
    ninja: str,
    commands: list[Command],
    directory: Path,
    log: Path,
    heed: Callable[[str], None],
    say: Callable[[str], None] | None,
) -> None:
    """Run the commands in `directory`, one per core at a time.

    Their output goes to `log`, and its lines to `heed` and `say`.
    """
    (directory / "build.ninja").write_text(ninja_text(commands))
    argv = [ninja, "-C", str(directory), "-v", f"-j{len(os.sched_getaffinity(0))}"]
    lines = []
    with (
        os.fdopen(open_private(log, os.O_WRONLY | os.O_TRUNC), "w") as file,
        subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=PRIVATE_UMASK
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()
            lines.append(line.rstrip())
            heed(lines[-1])
            if say:
                say(lines[-1])
    if process.returncode:
        shown = "\n".join(lines[-SHOWN_LINES:])
        raise BuildError(f"the kernels do not compile; the whole output is in {log}, its end is:\n{shown}")


def _names(tools: Toolchain) -> str:
    return f"{tools.cxx_version} and CUDA {tools.nvcc_version}" if tools.nvcc else tools.cxx_version


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """kernels"""

    verbose: bool = option(False, "Show the compilers' command lines and output.")
    force: bool = option(False, "Build even if the library exists.")
    check_device_code: bool = option(False, "Only compile the .cu files, which needs no GPU; keep nothing.")

    def check(self) -> None:
        """Raise ValueError for --force with --check-device-code, which keeps no library to replace."""
        if self.check_device_code and self.force:
            raise option_error("--check-device-code", "(given)", "contradicts --force; give one")


def main() -> None:
    settings = parse_options(Settings, "megatron_zpp.ops.build", __doc__, sys.argv[1:])
    say = partial(print, flush=True)
    try:
        if settings.check_device_code:
            check_device_code(say, verbose=settings.verbose)
        else:
            say(str(build(say=say, verbose=settings.verbose, force=settings.force)))
    except BuildError as error:
        sys.exit(f"megatron_zpp.ops.build: error: {error}")  # run_tool would join the compiler's lines


if __name__ == "__main__":
    run_tool("megatron_zpp.ops.build", main)
