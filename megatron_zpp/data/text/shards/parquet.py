"""Shards in Parquet, cut into pieces of rows by the index at the end of each file.

A row group can only be read from its beginning. So a piece is part of a row group, or of a run of small ones.
"""

import bisect
import hashlib
import json
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.data.text.shards.files import THREADS, Shard, ShardFile
from megatron_zpp.storage.files import locked, write_text

_BATCH_ROWS = 64  # decoded at a time, so that an error names a row within 64 of the damage
_BUFFER = 1 << 20  # bytes read at a time, instead of a whole column of a row group


@dataclass(frozen=True)
class RowGroups:
    """Where the row groups of a file end: in rows, and in bytes of the column of text, uncompressed."""

    rows: tuple[int, ...]  # (groups + 1,), from 0
    size: tuple[int, ...]  # (groups + 1,), from 0
    kind: str = ""  # type of the column, if it is not a string

    def row_at(self, offset: int) -> int:
        """Return the row at a byte of the column, as if the rows of a group had equal sizes."""
        group = bisect.bisect_right(self.size, offset) - 1
        if group + 1 == len(self.size):
            return self.rows[-1]
        rows, size = (edges[group + 1] - edges[group] for edges in (self.rows, self.size))
        return self.rows[group] + (offset - self.size[group]) * rows // size

    def group_of(self, row: int) -> int:
        return bisect.bisect_right(self.rows, row) - 1


class ParquetShard(Shard):
    """A Parquet file, whose items are rows as JSON lines; row groups are found by seeking."""

    def __init__(self, file: ShardFile, key: str, groups: RowGroups, block_bytes: int) -> None:
        self.file, self._key, self._groups = file, key, groups
        self._cuts = _cut(groups, block_bytes)  # (first piece, first byte), and the end
        self.pieces = self._cuts[-1][0]
        self.entries: Sequence[int] = [piece for piece, _ in self._cuts[:-1]]

    def read(self, piece: int) -> bytes:
        first, last = self._edge(piece), self._edge(piece + 1)
        if first == last:
            return b""
        group, ahead = self._groups.group_of(first), self._items is not None and self._next <= first
        if not ahead or self._groups.group_of(self._next) < group:
            self._begin(self._lines(group), self._groups.rows[group])
        return b"".join(self._take(first, last))

    def location(self, piece: int, line: int) -> str:
        return f"{self.file.path} row {self._edge(piece) + line}"

    def _edge(self, piece: int) -> int:
        """Return the first row of a piece."""
        index = min(bisect.bisect_right(self._cuts, (piece, self._groups.size[-1])), len(self._cuts) - 1)
        (first, start), (last, end) = self._cuts[index - 1], self._cuts[index]
        return self._groups.row_at(start + (end - start) * (piece - first) // (last - first))

    def _lines(self, group: int) -> Generator[bytes, None, None]:
        """Yield the rows from a row group on."""
        with self.file.open() as raw:
            file = None
            for number in range(group, len(self._groups.rows) - 1):
                row, last = self._groups.rows[number : number + 2]
                try:
                    file = file or _open(raw)
                    reading = {"row_groups": [number], "columns": [self._key], "use_threads": False}
                    for batch in file.iter_batches(_BATCH_ROWS, **reading):
                        lines = _json_lines(self._key, batch.column(0))
                        yield from lines
                        row += len(lines)
                except Exception as error:  # pyarrow raises subclasses of several built-in errors
                    raise _damaged(self.file, row, one_line(error)) from None
                if row != last:  # pyarrow ends a row group at a page that it does not know
                    raise _damaged(self.file, row, "its row group has not the rows that its index says")


def _cut(groups: RowGroups, block_bytes: int) -> list[tuple[int, int]]:
    """Return the (piece, byte) at which each run of row groups begins, at least a block long, and the end."""
    cuts, begin = [(0, 0)], 0
    for group in range(1, len(groups.rows)):
        rows, size = groups.rows[group] - groups.rows[begin], groups.size[group] - groups.size[begin]
        if rows and (size >= block_bytes or group + 1 == len(groups.rows)):
            cuts.append((cuts[-1][0] + min(rows, -(-size // block_bytes)), groups.size[group]))
            begin = group
    return cuts


def _open(raw: Any) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(
        raw, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True
    )


def _json_lines(key: str, column: Any) -> list[bytes]:
    """Return the values of a column of Arrow as JSON lines, bytes as UTF-8.

    Text that is not UTF-8 becomes a bad line, and a value of a type that is not text one without a string.
    """
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_string(column.type):
        column = column.cast(pyarrow.large_binary())
    return [_json_line(key, value) for value in column.to_pylist()]


def _json_line(key: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:  # the encoder reports the bytes
            return b"{%s: " % json.dumps(key).encode() + value.replace(b"\n", b" ") + b"}\n"
    line = json.dumps({key: value}, default=lambda other: {type(other).__name__: str(other)})
    return line.encode() + b"\n"


def _is_string(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _damaged(file: ShardFile, row: int, why: str) -> ValueError:
    what = f"the Parquet data is damaged here or in the next {_BATCH_ROWS} rows ({why})"
    return ValueError(f"{file.path} row {row + 1}: {what}; create the file again")


def read_indexes(
    flag: str, name: str, files: Sequence[ShardFile], key: str, directory: Path
) -> list[RowGroups]:
    """Return the row groups of all files, which reads the end of each.

    Those of remote files are kept in `directory`, where later runs and other ranks find them. Raises
    ValueError for a file that is no Parquet file, or has no column `key`.
    """

    def read_all() -> list[RowGroups]:
        shown = [name, *(f"{name}: {file.path}" for file in files[1:])]
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(lambda file, where: _read_index(flag, where, file, key), files, shown))

    if not files or not files[0].remote:
        return read_all()
    made_of = json.dumps([key, *(file.record().name + file.contents for file in files)])
    path = directory / f"{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.rows.json"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / "lock"):  # one rank reads the ends of all files, and the others wait
            if not path.exists():
                groups = read_all()
                write_text(path, json.dumps([[each.rows, each.size, each.kind] for each in groups]))
    try:
        kept = json.loads(path.read_text())
        return [RowGroups(tuple(rows), tuple(size), kind) for rows, size, kind in kept]
    except ValueError as error:
        raise option_error(flag, name, f"{path}: damaged ({one_line(error)}); remove this file") from None


def _read_index(flag: str, where: str, file: ShardFile, key: str) -> RowGroups:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise option_error(flag, where, "needs the package pyarrow; pip install pyarrow") from None
    try:
        with file.open() as raw:
            parquet = _open(raw)
            index, schema = parquet.metadata, parquet.schema_arrow
    except Exception as error:  # pyarrow raises subclasses of several built-in errors
        fix = f"is no Parquet file, or its index is damaged ({one_line(error)}); create it again"
        raise option_error(flag, file.path, fix) from None
    if key not in schema.names:
        raise option_error("--json-key", key, f"{where} has no such column; it has {', '.join(schema.names)}")
    kind = schema.field(key).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    paths = [index.schema.column(number).path for number in range(index.num_columns)]
    numbers = [n for n, path in enumerate(paths) if path == key or path.startswith(f"{key}.")]
    rows, size = [0], [0]
    for group in map(index.row_group, range(index.num_row_groups)):
        text_bytes = sum(group.column(number).total_uncompressed_size for number in numbers)
        rows.append(rows[-1] + group.num_rows)
        size.append(size[-1] + (max(1, text_bytes) if group.num_rows else 0))
    return RowGroups(tuple(rows), tuple(size), "" if _is_string(kind) else str(kind))
