"""Arrays in files: the values of numpy, one line if the file has become shorter, and no SIGBUS."""

import errno
import itertools
import os
import re
import resource
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.file_array import FileArray, OpenFile
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.windows import WindowDataset
from megatron_zpp.storage.checksums import DamagedFile
from tests.support import refusal

SHORTER = r"^{path}: has {now} bytes, and had {before} when it was opened: another program has shortened it; "


@pytest.fixture(params=[(), (2,)], ids=["numbers", "pairs"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FileArray, np.ndarray]:
    """Return the same rows in a file, at an odd offset, and in memory."""
    rows = np.arange(20_000 * (2 if request.param else 1), dtype="<i4").reshape(20_000, *request.param)
    (tmp_path / "file").write_bytes(b"abc" + rows.tobytes())
    return FileArray(OpenFile(tmp_path / "file"), "<i4", 3, rows.shape), rows


def test_indexes_as_numpy_does(both: tuple[FileArray, np.ndarray]) -> None:
    found, rows = both
    for name in ("shape", "dtype", "size", "nbytes"):
        assert getattr(found, name) == getattr(rows, name)
    for key in (slice(None), slice(5, 9), slice(9, 5), slice(-3, None), slice(7, 99_999), 0, -1, 19_999):
        assert np.array_equal(found[key], rows[key]), key
    for numbers in ([], [3], [5, 4, 4], [0, 19_999, 7], list(range(100))):
        taken = found[np.array(numbers, np.int64)]
        assert taken.dtype == rows.dtype
        assert np.array_equal(taken, rows[np.array(numbers, np.int64)])
    starts, lengths = np.array([10, 0, 19_990, 3]), np.array([2, 0, 10, 1])
    pieces = [rows[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    assert np.array_equal(found.gather(starts, lengths), np.concatenate(pieces))
    assert np.array_equal(found, rows)


def test_numbers_outside_are_refused(both: tuple[FileArray, np.ndarray]) -> None:
    found, _ = both
    for key in (-20_001, 20_000, np.array([20_000]), np.array([-1]), np.array([0, 20_000])):
        with pytest.raises(IndexError):
            found[key]
    with pytest.raises(IndexError):
        found.gather(np.array([19_999]), np.array([2]))


@pytest.fixture
def data(tmp_path: Path) -> IndexedDataset:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_documents(np.arange(60_000), np.full(60, 1000))
    return IndexedDataset(tmp_path / "x")


def test_tokens_that_are_truncated_during_a_run_are_an_error_and_not_sigbus(data: IndexedDataset) -> None:
    path = f"{data.prefix}.bin"
    samples = WindowDataset(data, 0, data.num_tokens, 100, 60_000, seed=1)
    with MicroBatches(samples, BatchSchedule(4, 4, 1), rank=0, num_workers=1) as batches:
        stream = iter(batches)
        next(stream)
        os.truncate(path, 4096)
        said = refusal(list, itertools.islice(stream, 100))
    assert re.match(SHORTER.format(path=path, now=4096, before=120_000), said)


def test_an_error_of_the_file_system_names_file_and_offset(
    data: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    place = f"{data.prefix}.bin: bytes 20 to 24 cannot be read: Input/output error"
    for read in (lambda: data.tokens[10:12], lambda: data.tokens.gather(np.array([10]), np.array([2]))):
        with pytest.raises(DamagedFile, match=f"^{place}$"):
            read()


def test_a_file_system_that_returns_fewer_bytes_than_requested(
    data: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, start: pread(file, min(size, 1000), start))
    assert np.array_equal(data.tokens[:], np.arange(60_000))
    found = data.tokens.gather(np.array([5, 700]), np.array([3000, 4000]))
    assert np.array_equal(found, np.r_[5:3005, 700:4700])


def test_more_files_than_the_limit_of_open_files(tmp_path: Path) -> None:
    """A blend of hundreds of data sets, where the soft limit is 1024."""
    (tmp_path / "file").write_bytes(b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = len(os.listdir("/proc/self/fd")) + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        held = [OpenFile(tmp_path / "file") for _ in range(50)]
        del held
        assert len(os.listdir("/proc/self/fd")) <= low  # closed with their last reference
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
