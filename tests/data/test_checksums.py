"""With checksums, any flipped bit or truncation of .idx is found at open, of .bin by verify_tokens."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.config.data import DataConfig
from megatron_zpp.data.checksums import checksums_path
from megatron_zpp.data.indexed import IndexedDataset, verify_tokens
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.storage import checksums
from megatron_zpp.storage.checksummed_writer import ChecksummedWriter
from megatron_zpp.storage.checksums import DamagedFile
from tests.data.conftest import open_data
from tests.data.format_by_hand import write_by_hand
from tests.support import flipped

CHUNK = 64


def write(prefix: Path, tokens: int = 500) -> str:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for first in range(0, tokens, 60):
            writer.add_document(np.arange(first, min(first + 60, tokens)))
    return str(prefix)


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set whose files have many chunks."""
    monkeypatch.setattr(checksums, "MIN_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(checksums.checksums_of, "__defaults__", (CHUNK,))
    monkeypatch.setattr(ChecksummedWriter.__init__, "__defaults__", (CHUNK,))
    return write(tmp_path / "x")


def verify(*prefixes: str, parts: int = 1) -> list[str | None]:
    """Return what each of `parts` ranks reports."""
    data, said = [IndexedDataset(prefix) for prefix in prefixes], []
    for part in range(parts):
        try:
            said.append(verify_tokens(data, part, parts))
        except DamagedFile as damage:
            said.append(str(damage))
    return said


@pytest.mark.parametrize("parts", [1, 3, 60])
def test_every_chunk_of_every_file_is_one_ranks(prefix: str, tmp_path: Path, parts: int) -> None:
    prefixes = [prefix, write(tmp_path / "y", 7), write(tmp_path / "z", 333)]
    assert verify(*prefixes, parts=parts) == [None] * parts
    for damaged in prefixes:
        path = Path(f"{damaged}.bin")
        whole = path.read_bytes()
        for first in range(0, len(whole), CHUNK):
            path.write_bytes(flipped(whole, 8 * first))
            (said,) = filter(None, verify(*prefixes, parts=parts))
            assert said.startswith(f"{path}: damaged between bytes {first} and ")
            assert said.endswith(f"remove {damaged}.checksums.json if another program wrote this data since")
        path.write_bytes(whole)


def test_another_digest_is_blamed_on_the_checksums(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x")
    path = Path(checksums_path(prefix))
    first = re.search(r'"sha256": \[\s*"(\w)', text := path.read_text()).start(1)
    path.write_text(text[:first] + ("0" if text[first] != "0" else "1") + text[first + 1 :])
    with pytest.raises(DamagedFile, match=rf"^{path}: damaged \(the SHA-256 of its contents differs\)"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("content", ["[]", '{"files": 5, "sha256": 5}', "[" * 100_000, "1" * 5000, "\xff"])
def test_invalid_checksum_files(tmp_path: Path, content: str) -> None:
    prefix = write(tmp_path / "x")
    Path(checksums_path(prefix)).write_bytes(content.encode("latin-1"))
    with pytest.raises(DamagedFile, match=r"x.checksums.json: damaged \(.*remove this file"):
        IndexedDataset(prefix)


def test_data_of_megatron_opens_without_checksums_and_is_not_verified(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "x", [[1] * 50])
    path = str(tmp_path / "x")
    assert IndexedDataset(path).checksums is None
    open_data(DataConfig(train_data_path=(path,)))
    with pytest.raises(
        ValueError, match=rf"^--verify-data \(given\): {path}.checksums.json is missing; .*omit"
    ):
        open_data(DataConfig(train_data_path=(path,), verify_data=True))


def test_other_data_under_the_same_name_is_an_error(tmp_path: Path) -> None:
    """Megatron-LM overwrote the files and did not update our checksums."""
    prefix = write(tmp_path / "x")
    write_by_hand(prefix, [[1] * 50])
    with pytest.raises(DamagedFile, match=r"x.idx: .*or remove .*x.checksums.json if another program wrote"):
        IndexedDataset(prefix)
    os.remove(checksums_path(prefix))
    assert IndexedDataset(prefix).num_tokens == 50
