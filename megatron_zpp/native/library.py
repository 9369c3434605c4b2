"""Makes a library of one C++ file without dependencies, once for each content and compiler."""

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

# For any processor of its kind, as others may share the cache; results must not depend on the compiler.
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wno-psabi")
WAIT_SECONDS = 120.0  # many times what a file takes
SHOWN_LINES = 10


def load_source(
    source: Path, say: Callable[[str], None], environ: Mapping[str, str] = os.environ
) -> ctypes.CDLL:
    """The library of `source`, built by CXX or g++ unless it is there already, as it was written.

    It lies where the kernels do: see megatron_zpp.ops.build. Raises BuildError.
    """
    cxx = shutil.which(environ.get("CXX") or "g++", path=environ.get("PATH", os.defpath))
    if cxx is None:
        raise BuildError(f"the C++ compiler {environ.get('CXX') or 'g++'} is not installed")
    facts = (source.read_text(), _run(cxx, "--version"), " ".join(FLAGS), platform.machine())
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
    cache = cache_directory(environ)
    library = cache / f"{source.stem}-{key}.so"
    if problem_of(library):
        with locked(cache / f"{library.stem}.lock", say, WAIT_SECONDS):
            if problem := problem_of(library):
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
    """What a command says. Raises BuildError where it fails, with its last lines."""
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
        raise BuildError(f"{argv[0]} does not run: {error}") from error
    if done.returncode:
        shown = "\n".join(done.stdout.splitlines()[-SHOWN_LINES:])
        raise BuildError(f"{argv[0]} ends with status {done.returncode}:\n{shown}")
    return done.stdout
