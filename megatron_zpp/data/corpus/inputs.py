"""Finds input files, and reads them in blocks of whole lines."""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_zpp.config.options import option_error
from megatron_zpp.config.values.text import JSON_LINES, SUFFIXES, fixed_directory, plain_suffix
from megatron_zpp.config.words import either
from megatron_zpp.data.corpus.compression import RATIO, decompressed, lines_by_chunk
from megatron_zpp.storage.regular import UnfitFile, open_regular, open_stream

TEXT = (".txt",)
_CACHES = (".tokens", ".orders")  # ends of the names of directories that this program writes beside data
_RECORDS = (".checksums.json", ".tokenizer.json")  # ends of the files that it writes beside PREFIX.idx


@dataclass(frozen=True)
class Block:
    """Whole lines of a file; the last line of the file may have no newline."""

    content: bytes
    disk_bytes: int  # size of the block in the file, which may be compressed


def find_files(flag: str, patterns: Sequence[str], *, output: str | None = None) -> list[str]:
    """Return the files that match names, globs and directories: in the order given, sorted within each.

    A directory stands for every file below it with a suffix of text or JSON lines. Globs and directories omit
    what this program wrote: caches of tokens and orders, records of tokenised data, and the file `output` of
    the flag --output. Directories also omit hidden directories. Raises ValueError if a pattern matches
    nothing, a file twice, also by a link, or is `output`, or if a file cannot be read or is not regular:
    parts of a file are read in parallel, so a pipe has to be saved to a file first.
    """
    files: list[str] = []
    first: dict[str, tuple[str, str]] = {}  # the pattern and the name that each file was first found by
    written = None if output is None else os.path.realpath(output)
    for pattern in patterns:
        found = _find(pattern)
        if written is not None:
            if os.path.isfile(pattern) and os.path.realpath(pattern) == written:
                raise option_error(flag, pattern, "is --output as well; give another file to one of them")
            found = [path for path in found if os.path.realpath(path) != written]
        if not found:
            fix = "no such file, and no file matches; check the path"
            if os.path.isdir(pattern):
                fix = f"holds no {either(TEXT + JSON_LINES)} file"
            raise option_error(flag, pattern, fix)
        for path in found:
            if earlier := first.get(real := os.path.realpath(path)):
                where = earlier[earlier[1] != path]  # another name of it: a link
                raise option_error(flag, path, f"{where} has it already; give each file once")
            first[real] = pattern, path
            try:
                os.close(open_regular(path))
            except UnfitFile as error:
                raise option_error(flag, path, f"{error.strerror}; save the text to a file") from None
            except OSError:
                raise option_error(flag, path, "cannot be read; check its permissions") from None
        files += found
    return files


def _find(pattern: str) -> list[str]:
    if os.path.isdir(pattern):
        below = (path for path in Path(pattern).rglob("*") if path.is_file())
        texts = [path for path in below if plain_suffix(str(path)) in JSON_LINES + TEXT]
        folders = {path: path.relative_to(pattern).parent.parts for path in texts}
        shown = (path for path in texts if not any(part.startswith(".") for part in folders[path]))
        return sorted(str(path) for path in shown if not _is_own(path, pattern))
    if os.path.exists(pattern):
        return [pattern]
    matches = {path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}
    if any(ending in pattern for ending in _CACHES):
        return sorted(matches)
    return sorted(path for path in matches if not _is_own(Path(path), fixed_directory(pattern)))


def _is_own(path: Path, start: str) -> bool:
    """Whether this program wrote a file below the directory `start` into a cache or beside tokenised data."""
    if any(part.endswith(_CACHES) for part in path.relative_to(start).parent.parts):
        return True
    prefixes = [path.name.removesuffix(ending) for ending in _RECORDS if path.name.endswith(ending)]
    return any(path.with_name(f"{prefix}.idx").exists() for prefix in prefixes)


def read_blocks(path: str, block_bytes: int) -> Iterator[Block]:
    """Yield the lines of a file in blocks of about `block_bytes`; a longer line is one block.

    A block of a compressed file is what a range of its bytes adds. Raises ValueError if compressed data is
    damaged or ends too early.
    """
    with open_stream(path) as raw:
        if path.endswith(SUFFIXES):
            left, chunk = os.fstat(raw.fileno()).st_size, max(1, block_bytes // RATIO)
            for content in lines_by_chunk(decompressed(raw, path, chunk)):
                yield Block(content, min(chunk, left))
                left -= min(chunk, left)
            return
        while content := raw.read(block_bytes):
            if not content.endswith(b"\n"):
                content += raw.readline()
            yield Block(content, len(content))


def lines_that_begin(raw: BinaryIO, start: int, end: int) -> bytes:
    """Return the lines of an uncompressed file that begin in the bytes [start, end)."""
    if start:
        raw.seek(start - 1)
        # A line that began earlier belongs to the bytes before.
        start += len(raw.readline(end - start + 1)) - 1
    if start >= end:
        return b""
    content = raw.read(end - start)
    return content if content.endswith(b"\n") else content + raw.readline()
