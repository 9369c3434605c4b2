"""The corpus that is always there: the source of the running interpreter's standard library."""

import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from megatron_zpp.data.corpus.problems import Problem
from megatron_zpp.data.corpus.texts import Texts, keep
from megatron_zpp.storage.regular import open_stream

_INSTALLED = ("site-packages", "dist-packages")  # what was added to the interpreter differs by machine


def standard_library() -> Path:
    """Its directory. Raises ValueError where the interpreter has it only as bytecode or in an archive."""
    directory = Path(sysconfig.get_paths()["stdlib"])
    if not (directory / "os.py").is_file():
        raise ValueError(f"{directory}: no source of the standard library here; give a corpus with --input")
    return directory


def source_files(directory: Path) -> list[Path]:
    """Every .py file below that is not empty, without installed packages, in the order of their names."""
    files: list[Path] = []
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if name not in _INSTALLED]
        files += (Path(folder, name) for name in names if name.endswith(".py"))
    files = [path for path in files if path.stat().st_size]
    return sorted(files, key=lambda path: path.relative_to(directory).parts)


def read_source(directory: Path, files: list[Path]) -> Iterator[Texts]:
    """One document a file, decoded as PEP 263 says; its path is relative to `directory`."""
    for file in files:
        path, size = file.relative_to(directory).as_posix(), file.stat().st_size
        try:
            with open_stream(file) as raw:
                encoding, _ = tokenize.detect_encoding(raw.readline)
                raw.seek(0)
                text = io.TextIOWrapper(raw, encoding).read()
        except (SyntaxError, UnicodeDecodeError) as error:  # the library's tests have some on purpose
            yield keep(path, [], [Problem(1, "undecodable file", str(error))], size)
            continue
        yield keep(path, [(1, text)], [], size)
