"""The writer of indexed files: the bytes of the format, and either both files or none."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.config.command_line import one_line
from megatron_zpp.data import indexed_writer
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.storage.files import write_durably, write_whole
from tests.data.format_by_hand import write_by_hand

DESCRIPTION = {"tokenizer_type": "NullTokenizer", "vocab_size": 10, "eod": 9, "fingerprint": "abc"}


def names(directory):
    return sorted(os.listdir(directory))


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 65535), max_size=5), min_size=1, max_size=9).filter(any))
def test_bytes_are_those_of_the_format(tmp_path_factory, sequences):
    directory = tmp_path_factory.mktemp("pair")
    write_by_hand(directory / "hand", sequences)
    with IndexedDatasetWriter(directory / "one", np.uint16) as writer:
        for sequence in sequences:
            writer.add_document(sequence)
    with IndexedDatasetWriter(directory / "bulk", np.uint16) as writer:
        writer.add_documents(np.concatenate(sequences).astype(np.int64), [len(s) for s in sequences])
    for suffix in (".bin", ".idx"):
        expected = (directory / f"hand{suffix}").read_bytes()
        assert (directory / f"one{suffix}").read_bytes() == expected
        assert (directory / f"bulk{suffix}").read_bytes() == expected


def test_index_of_several_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_writer, "_CHUNK", 7)
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        writer.add_documents(np.arange(40) + 70_000, [2] * 20)
    data = IndexedDataset(tmp_path / "x")
    assert data.pointers[:].tolist() == list(range(0, 160, 8))
    assert data.document_indices[:].tolist() == list(range(21))


@pytest.mark.parametrize(
    ("dtype", "document", "message"),
    [
        ("uint16", [1, -1, 2], "token id -1 does not fit uint16"),
        ("uint16", [65536], "token id 65536 does not fit uint16"),
        ("int32", [2**31], "token id 2147483648 does not fit int32"),
        ("uint16", [], "no tokens to write"),
    ],
)
def test_what_cannot_be_written_is_refused_and_keeps_the_old_files(tmp_path, dtype, document, message):
    with IndexedDatasetWriter(tmp_path / "x", "u2") as writer:
        writer.add_document([1, 2, 3])
    with (
        pytest.raises(ValueError, match=f"x: {message}"),
        IndexedDatasetWriter(tmp_path / "x", dtype) as writer,
    ):
        writer.add_document(document)
    assert IndexedDataset(tmp_path / "x").tokens[:].tolist() == [1, 2, 3]
    assert names(tmp_path) == ["x.bin", "x.checksums.json", "x.idx"]


def write_tokens(path, count):
    with IndexedDatasetWriter(path.with_suffix(""), "u2") as writer:
        writer.add_document([1] * count)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.bin", lambda path: write_tokens(path, 3000)),
        ("x.bin", lambda path: write_tokens(path, 20 << 20)),  # fails before the commit
        ("x.jsonl", lambda path: write_whole(path, bytes(6000))),
        ("x.json", lambda path: write_durably(path, bytes(6000))),
    ],
)
def test_a_write_that_fails_names_the_file(tmp_path, name, write):
    """A limit of a file's size stops writes as a full disk does."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large") as failure:
            write(tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert one_line(failure.value) == f"{tmp_path / name}: File too large"


def test_replaces_data_together_with_its_provenance(tmp_path):
    for provenance in (DESCRIPTION, DESCRIPTION | {"eod": 3}, None):
        with IndexedDatasetWriter(tmp_path / "x", "u2", provenance=provenance) as writer:
            writer.add_document([1])
        path = tmp_path / "x.tokenizer.json"
        assert (json.loads(path.read_text()) if path.exists() else None) == provenance
    assert names(tmp_path) == ["x.bin", "x.checksums.json", "x.idx"]


def test_second_writer_of_a_prefix_is_refused(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", "u2") as first:
        first.add_document([1])
        with (
            pytest.raises(ValueError, match="another process is writing this data set"),
            IndexedDatasetWriter(tmp_path / "x", "u2"),
        ):
            pass
        first.add_document([2])
    assert IndexedDataset(tmp_path / "x").tokens[:].tolist() == [1, 2]


@pytest.mark.parametrize("last", ["x.bin", "x.idx"])
def test_an_index_has_its_own_tokens_or_is_not_there(tmp_path, monkeypatch, last):
    """Where a writer ends at a renaming; benchmarks/faults/ kills it at each of its calls."""
    with IndexedDatasetWriter(tmp_path / "x", "u2") as writer:
        writer.add_document([1, 2])
    replace = os.replace

    def interrupted(source, target):
        if Path(target).name == last:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), IndexedDatasetWriter(tmp_path / "x", "u2") as writer:
        writer.add_document([3])
    assert not (tmp_path / "x.idx").exists()
    monkeypatch.undo()
    with IndexedDatasetWriter(tmp_path / "x", "u2") as writer:  # over what is left
        writer.add_document([7])
    assert IndexedDataset(tmp_path / "x").tokens[:].tolist() == [7]
    assert names(tmp_path) == ["x.bin", "x.checksums.json", "x.idx"]
