"""Compile one C++ file without dependencies to a library, once per version of the file and compiler."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_zpp.native.cache import (
    PRIVATE_UMASK,
    BuildError,
    building_directory,
    cache_directory,
    locked,
)
from megatron_zpp.native.library_file import install, problem_of

# Without -march=native, because machines may share the cache. Results must not depend on the compiler.
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wno-psabi")
WAIT_SECONDS = 120.0  # many times the duration of a build
SHOWN_LINES = 10


def load_source(
    source: Path, say: Callable[[str], None], environ: Mapping[str, str] = os.environ
) -> ctypes.CDLL:
    """Load the library of `source`, compiled by CXX or g++ first if it is missing or damaged.

    It is saved in the directory of the kernels: see megatron_zpp.ops.build. Raises BuildError.
    """
    cxx = shutil.which(environ.get("CXX") or "g++", path=environ.get("PATH", os.defpath))
    if cxx is None:
        raise BuildError(f"the C++ compiler {environ.get('CXX') or 'g++'} is not installed")
    facts = (source.read_text(), _run(cxx, "--version"), " ".join(FLAGS), platform.machine())
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
    cache = cache_directory(environ)
    library = cache / f"{source.stem}-{key}.so"
    if problem_of(library):
        lock, is_built = cache / f"{library.stem}.lock", lambda: problem_of(library) is None
        with locked(lock, say, WAIT_SECONDS, is_built=is_built) as held:
            if held and (problem := problem_of(library)):
                if library.exists():
                    say(f"building {library} again: {problem}")
                with building_directory(cache, library.stem) as directory:
                    built = directory / library.name
                    _run(cxx, *FLAGS, "-x", "c++", str(source), "-o", str(built))
                    install(built, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library} cannot be loaded: {error}; remove it") from None


def _run(*argv: str) -> str:
    """The output of a command. Raises BuildError with its last lines if it fails."""
    try:
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            umask=PRIVATE_UMASK,
        )
    except OSError as error:
        raise BuildError(f"{argv[0]} cannot be run: {error}") from error
    if done.returncode:
        shown = "\n".join(done.stdout.splitlines()[-SHOWN_LINES:])
        raise BuildError(f"{argv[0]} exited with status {done.returncode}:\n{shown}")
    return done.stdout
