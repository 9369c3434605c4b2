"""A corpus that is always available: the source of the running interpreter's standard library."""

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from megatron_zpp.data.corpus.texts import Texts, keep

_OMITTED = frozenset(
    (
        *("site-packages", "dist-packages"),  # installed packages differ between machines
        *("test", "tests", "idle_test"),  # two thirds of the bytes: a model would learn to write assertEqual
        *("encodings", "pydoc_data"),  # generated tables
    )
)


def standard_library() -> Path:
    """Return its directory. Raises ValueError if the library is only bytecode or in an archive."""
    directory = Path(sysconfig.get_paths()["stdlib"])
    if not (directory / "os.py").is_file():
        raise ValueError(f"{directory}: has no source of the standard library; give a corpus with --input")
    return directory


def source_files(directory: Path) -> list[Path]:
    """Return the library's .py files that are not empty, sorted by path.

    Folders of installed packages, of tests and of generated tables are omitted.
    """
    files: list[Path] = []
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if name not in _OMITTED]
        files += (Path(folder, name) for name in names if name.endswith(".py"))
    files = [path for path in files if path.stat().st_size]
    return sorted(files, key=lambda path: path.relative_to(directory).parts)


def read_source(directory: Path, files: list[Path]) -> Iterator[Texts]:
    """Yield one document per file, decoded by the rules of PEP 263; paths are relative to `directory`."""
    for file in files:
        with tokenize.open(file) as source:
            numbered = [(1, source.read())]
        yield keep(file.relative_to(directory).as_posix(), numbered, [], file.stat().st_size)
