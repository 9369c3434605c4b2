"""Text in shards: the documents of all files, read as far as samples need, and errors that name the shard."""

import datetime
import gzip
import io
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron_zpp.data.corpus.compression import lines_by_chunk
from megatron_zpp.data.text.samples import TextDataset
from megatron_zpp.data.text.shards import parquet as parquet_shards
from megatron_zpp.data.text.shards.text import ShardedText, _bytes_of_block, open_shards
from megatron_zpp.data.text.sources import TextSource
from tests.data.text.conftest import EOD, documents_of, json_lines, opened, with_ends
from tests.support import flipped, nightly, refusal


def write_shards(
    directory: Path, kind: str, documents: list[list[int]], count: int = 7, group: int = 23
) -> str:
    """Write `count` shards, in the order of the documents, and return their glob."""
    directory.mkdir(parents=True, exist_ok=True)
    edges = [len(documents) * edge // count for edge in range(count + 1)]
    for number in range(count):
        part = documents[edges[number] : edges[number + 1]]
        path = directory / f"{number:02}.{kind}"
        if kind == "parquet":
            texts = [" ".join(map(str, ids)) for ids in part]
            pq.write_table(pa.table({"n": range(len(part)), "text": texts}), path, row_group_size=group)
        elif kind.endswith(".gz"):
            path.write_bytes(gzip.compress(json_lines(part[:9])) + gzip.compress(json_lines(part[9:])))
        elif kind.endswith(".zst"):
            path.write_bytes(zstandard.compress(json_lines(part)))
        else:
            path.write_bytes(json_lines(part))
    return str(directory / f"*.{kind}")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "json.zst"])
def test_shards_hold_all_documents(documents: list[list[int]], tmp_path: Path, kind: str) -> None:
    text = opened(write_shards(tmp_path / "shards", kind, documents), append_eod=True)
    assert documents_of(text, EOD) == with_ends(documents)
    assert (tmp_path / "shards.tokens").is_dir()
    assert "in 7 shards" in text.source.describe(text.source.blocks)
    shuffled = np.random.default_rng(0).permutation(text.source.blocks)
    again = opened(str(tmp_path / f"shards/*.{kind}"), data_cache_path=str(tmp_path / "new"), append_eod=True)
    parts = [again.tokens(np.array([block])) for block in shuffled.tolist()]  # backwards, too
    assert np.array_equal(np.concatenate(parts), text.tokens(shuffled))


def test_lines_belong_to_the_chunk_in_which_they_begin() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        text = draw.choice([b"a", b"b", b"\n"], draw.integers(0, 60), p=[0.6, 0.2, 0.2]).tobytes()
        cuts = np.sort(draw.integers(0, len(text) + 1, draw.integers(0, 12))).tolist()
        edges = [0, *cuts, len(text)]
        chunks = [text[a:b] for a, b in pairwise(edges)]
        expected, offset = [b""] * len(chunks), 0
        for line in text.splitlines(keepends=True):
            owner = max(k for k in range(len(chunks)) if edges[k] <= offset < edges[k + 1])
            expected[owner] += line
            offset += len(line)
        assert list(lines_by_chunk(chunks)) == expected


def random_documents(count: int) -> list[list[int]]:
    draw = np.random.default_rng(1)
    return [draw.integers(0, 60_000, 100).tolist() for _ in range(count)]


class CountingFile(io.FileIO):
    """A file that counts the bytes read from all of its kind."""

    count = 0

    def readinto(self, buffer) -> int:
        CountingFile.count += (read := super().readinto(buffer))
        return read

    def read(self, size: int = -1) -> bytes:
        CountingFile.count += len(content := super().read(size))
        return content


@pytest.mark.parametrize("kind", ["parquet", "jsonl", nightly("jsonl.gz")])
def test_the_first_sample_needs_a_fraction_of_the_bytes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests and indexes of all files are part of the count."""
    documents = random_documents(20_000)
    directory = tmp_path / "shards"
    pattern = write_shards(directory, kind, documents, 6, 400)
    total = sum(path.stat().st_size for path in directory.iterdir())
    monkeypatch.setattr(CountingFile, "count", 6 * 25_000)  # the digests
    monkeypatch.setattr(
        "megatron_zpp.data.text.shards.files.open_stream",
        lambda path, buffering=-1: io.BufferedReader(CountingFile(path)) if buffering else CountingFile(path),
    )
    text = opened(pattern, data_cache_path=str(tmp_path / "cache"))
    TextDataset("train", text, (0, text.source.blocks), 64, 7, 1).batch(np.arange(4))
    assert 0.1 * total < CountingFile.count < 0.4 * total
    assert (text.counts(np.arange(text.source.blocks)) >= 0).mean() < 0.15


def test_what_is_open_and_in_memory_is_bounded(tmp_path: Path) -> None:
    text = opened(write_shards(tmp_path / "shards", "parquet", random_documents(2_000), 40))
    text.source.group = 16
    samples, files = TextDataset("train", text, (0, text.source.blocks), 64, 7, 1), 0
    for first in range(0, 3000, 75):
        samples.batch(np.arange(first, first + 25))
        names = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
        files = max(files, sum(name.endswith("parquet") and str(tmp_path) in name for name in names))
        assert len(samples._rings) <= 2
        assert len(samples._order._sequences) <= 2
    assert 1 <= files <= 16


def test_a_damaged_parquet_file_is_named_with_its_row(documents: list[list[int]], tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, "parquet", documents)
    path = tmp_path / "03.parquet"
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(content)
    for skip in (False, True):
        said = refusal(documents_of, opened(pattern, skip_bad_lines=skip), 0)
        assert re.search(r"03\.parquet row (24|1): the Parquet data is damaged", said)
    path.write_bytes(content[:-20])
    with pytest.raises(ValueError, match=r"^--data-path .*03\.parquet: is no Parquet file, or its index"):
        opened(pattern)


def test_a_row_without_text_is_named_or_skipped(tmp_path: Path) -> None:
    broken = pa.array([b"1", b"\xff\n", None, b"2"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": pa.array(["7", "8"])}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": broken}), tmp_path / "b.parquet")
    pattern = str(tmp_path / "*.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet row 2: malformed line: not UTF-8 .*--skip-bad-lines$"):
        documents_of(opened(pattern), EOD)
    text = opened(pattern, skip_bad_lines=True, append_eod=True)
    assert documents_of(text, EOD) == [[7, EOD], [8, EOD], [1, EOD], [2, EOD]]
    pq.write_table(pa.table({"text": pa.array(["1", None])}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet row 2: value that is not text: 'text' is null; "):
        documents_of(opened(pattern), EOD)
    pq.write_table(pa.table({"text": [datetime.date(2020, 1, 1)]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet row 1: value that is not text: 'text' is an object; "):
        documents_of(opened(str(tmp_path / "a.parquet")), EOD)


@pytest.mark.parametrize("kind", [pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())], ids=str)
def test_bytes_of_a_parquet_column_are_utf_8(tmp_path: Path, kind: pa.DataType) -> None:
    """Not what Python prints for bytes."""
    column = pa.array([b"1 2", b"3 4", b"\xff 6"], pa.binary())
    pq.write_table(pa.table({"text": column.cast(kind)}), tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    text = opened(path, append_eod=True, skip_bad_lines=True)
    assert documents_of(text, EOD) == [[1, 2, EOD], [3, 4, EOD]]
    with pytest.raises(ValueError, match=r"a\.parquet row 3: malformed line: not UTF-8 .*--skip-bad-lines$"):
        documents_of(opened(path), EOD)


def test_tokens_cached_before_bytes_were_decoded_are_not_used(tmp_path: Path) -> None:
    """A column of strings keeps its tokens, and a resumed run finds the data set of its checkpoint."""

    def source(name: str, kind: pa.DataType) -> ShardedText:
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"text": pa.array(["1 2"]).cast(kind)}), path)
        return open_shards("--data-path", name, [str(path)], "text", tmp_path / "cache")

    keys = {"name", "shards", "contents", "modified", "blocks"}  # of version 0.1
    of_bytes = source("bytes", pa.binary())
    assert set(source("strings", pa.large_string()).made_of) == keys
    assert set(of_bytes.made_of) > keys
    before = {key: value for key, value in of_bytes.made_of.items() if key in keys}
    assert of_bytes.fingerprint() == TextSource.fingerprint(SimpleNamespace(made_of=before))


def test_a_bad_line_of_a_shard_is_named(documents: list[list[int]], tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, "jsonl.gz", documents)
    lines = json_lines(documents).splitlines(keepends=True)
    lines[33] = b'{"text": \n'
    (tmp_path / "02.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
    text = opened(pattern, num_workers=1)
    said = refusal(TextDataset, "train", text, (0, text.source.blocks), 8, 1, None)
    assert "02.jsonl.gz line 34: malformed line: not JSON" in said
    (tmp_path / "plain.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=r"plain\.jsonl line 34: malformed line"):
        documents_of(opened(str(tmp_path / "p*.jsonl")), EOD)


def test_a_damaged_compressed_shard_is_named_with_a_line(documents: list[list[int]], tmp_path: Path) -> None:
    whole = gzip.compress(json_lines(documents))
    (tmp_path / "01.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "01.jsonl.zst").write_bytes(b"not compressed")
    for kind, message in (
        ("gz", r"01\.jsonl\.gz: the file ends in the middle .*\(after line \d+\)"),
        ("zst", r"01\.jsonl\.zst: the compressed data is damaged .*\(after line 0\)"),
    ):
        with pytest.raises(ValueError, match=message):
            documents_of(opened(str(tmp_path / f"*.{kind}")), 0)


def test_unusable_shards_are_an_error(documents: list[list[int]], tmp_path: Path) -> None:
    write_shards(tmp_path / "some", "parquet", documents)
    pq.write_table(pa.table({"body": ["1"]}), tmp_path / "some" / "99.parquet")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    for path, message in (
        ("gone/*.jsonl", r"^--data-path .*gone/\*\.jsonl: no such file, and no file matches"),
        ("gone.parquet", r"^--data-path .*gone\.parquet: no such file"),
        ("some/*.parquet", r"^--json-key text: .*99\.parquet has no such column; it has body$"),
        ("em*.jsonl", r"em\*\.jsonl: its 1 files have no bytes"),
        ("none.parquet", r"none\.parquet: its 1 files have no rows"),
    ):
        with pytest.raises(ValueError, match=message):
            opened(str(tmp_path / path))
    (tmp_path / "empty.jsonl.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.jsonl\.gz: the file ends in the middle of its com"):
        opened(str(tmp_path / "*.gz"))
    (tmp_path / "zero.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"zero\.parquet: is no Parquet file"):
        opened(str(tmp_path / "zero.parquet"))


def test_a_shard_that_changes_under_a_run_is_named(documents: list[list[int]], tmp_path: Path) -> None:
    text = opened(write_shards(tmp_path, "parquet", documents))
    text.tokens(np.arange(3))
    path = tmp_path / "00.parquet"
    os.utime(path, (1, 1))
    with pytest.raises(ValueError, match=r"00\.parquet: has changed since the run began"):
        text.tokens(np.arange(5))
    path.unlink()
    with pytest.raises(ValueError, match=r"00\.parquet: No such file or directory; .*restore it"):
        text.tokens(np.arange(5))


def test_remote_shards(documents: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory. One rank reads their indexes; the others, and later starts, read what it kept."""
    import fsspec

    write_shards(tmp_path / "local", "parquet", documents)
    files, read, whole = fsspec.filesystem("memory"), [], parquet_shards._read_index
    for path in (tmp_path / "local").iterdir():
        files.pipe(f"/{tmp_path.name}/{path.name}", path.read_bytes())
    urls = sorted(f"memory://{name}" for name in files.ls(f"/{tmp_path.name}", detail=False))

    def opened_urls(_: int = 0) -> ShardedText:
        return open_shards("--data-path", "set", urls, "text", tmp_path / "cache")

    def counted(*arguments: object) -> parquet_shards.RowGroups:
        read.append(arguments)
        return whole(*arguments)

    monkeypatch.setattr(parquet_shards, "_read_index", counted)
    with ThreadPoolExecutor(5) as ranks:
        source, *_ = ranks.map(opened_urls, range(5))
    lines = b"".join(map(opened_urls().read, range(source.blocks))).splitlines()
    assert [json.loads(line)["text"] for line in lines] == [" ".join(map(str, ids)) for ids in documents]
    assert len(read) == len(urls) == 7
    assert [record.name for record in source.shards()] == urls
    (kept,) = (tmp_path / "cache").glob("*.rows.json")
    content = kept.read_text()
    kept.write_text("[[")
    with pytest.raises(ValueError, match=r"^--data-path set: .*rows\.json: damaged \(.*remove this file$"):
        opened_urls()
    kept.write_text(content)
    with monkeypatch.context() as patch:
        patch.setattr(type(files), "_open", lambda *arguments, **options: 1 / 0)
        error = r"00\.parquet: cannot be read \(ZeroDivisionError: division by zero\); check"
        with pytest.raises(ValueError, match=error):
            opened_urls().read(0)
    another = urls[3].removeprefix("memory:/")
    files.pipe(another, files.cat(another))
    pairs = zip(source.shards(), opened_urls().shards(), strict=True)
    assert [old == new for old, new in pairs] == [number != 3 for number in range(7)]


def test_a_flipped_bit_of_a_page_header_is_found(tmp_path: Path) -> None:
    """Checksums are those of pages alone; pyarrow ends a row group at a page of an unknown kind."""
    path = tmp_path / "text.parquet"
    table = pa.table({"text": [str(number) for number in range(90)]})
    pq.write_table(table, path, row_group_size=30, write_page_checksum=True)
    good = path.read_bytes()
    expected = read_all(path, tmp_path)
    found = []
    for bit in range(8 * 4, 8 * 40, 3):  # behind the magic number
        path.write_bytes(flipped(good, bit))
        try:
            assert read_all(path, tmp_path) == expected, bit
        except ValueError as error:
            found.append(str(error))
    assert len(found) > 60
    assert all(str(path) in line for line in found)


def read_all(path: Path, directory: Path) -> bytes:
    """All lines of a Parquet file."""
    text = open_shards("--data-path", "set", [str(path)], "text", directory / "index")
    return b"".join(map(text.read, range(text.blocks)))


def test_blocks_keep_the_size_by_which_runs_have_begun() -> None:
    """A thousandth of the text, 1 KiB to 1 MiB, and up to 4 MiB beyond 64 GiB: the order follows from it."""
    blocks = {0: 10, 20: 10, 26: 16, 30: 20, 36: 20, 37: 21, 40: 22}  # powers of two: text, block
    assert {text: _bytes_of_block(2**text) for text in blocks} == {k: 2**block for k, block in blocks.items()}
