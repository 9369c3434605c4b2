"""Checksums by chunk: what is written is summed, every flip and cut is found where it is."""

import errno
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.storage import checksums
from megatron_zpp.storage.checksummed_writer import ChecksummedWriter
from megatron_zpp.storage.checksums import (
    CHUNK_BYTES,
    Checksums,
    DamagedFile,
    RecentChunks,
    VerifiedFile,
    checksums_of,
    digest_of,
    verify_file,
)
from tests.support import flipped

CHUNK = 16


def written(path: Path, pieces: list[bytes]) -> Checksums:
    writer = ChecksummedWriter(path, CHUNK)
    for piece in pieces:
        writer.write(piece)
    return writer.finish()


@settings(max_examples=60)
@given(pieces=st.lists(st.binary(max_size=50), max_size=8))
def test_sums_what_it_writes_whatever_the_pieces(tmp_path, pieces):
    sums = written(tmp_path / "file", pieces)
    content = b"".join(pieces)
    assert (tmp_path / "file").read_bytes() == content
    chunks = [content[first : first + CHUNK] for first in range(0, len(content), CHUNK)]
    assert sums.digests == tuple(hashlib.sha256(chunk).hexdigest() for chunk in chunks)
    assert sums == checksums_of(tmp_path / "file", CHUNK)
    usual = checksums_of(tmp_path / "file")
    assert usual == Checksums.from_json(usual.to_json(), tmp_path / "file")


@pytest.mark.parametrize("size", [1, 15, 16, 17, 48, 50])
def test_finds_every_flipped_bit_and_every_cut(tmp_path, size):
    path, content = tmp_path / "file", bytes(range(size))
    sums = written(path, [content])
    verify_file(path, sums)
    for bit in range(0, 8 * size, 3):
        path.write_bytes(flipped(content, bit))
        first = bit // 8 // CHUNK * CHUNK
        with pytest.raises(DamagedFile, match=f"{path}: damaged between bytes {first} and "):
            verify_file(path, sums)
    for length in [*range(size), size + 1]:
        path.write_bytes((content + b"x")[:length])
        with pytest.raises(DamagedFile, match=f"{path}: {length} bytes; {size} were written"):
            verify_file(path, sums)
    path.unlink()
    with pytest.raises(DamagedFile, match=f"{path}: missing"):
        verify_file(path, sums)


def read(file: VerifiedFile, start: int, length: int) -> bytes:
    target = bytearray(length)
    file.read_into(start, memoryview(target))
    return bytes(target)


def test_reads_any_range_and_checks_no_more_than_its_chunks(tmp_path):
    path, content = tmp_path / "file", bytes(range(50))
    sums = written(path, [content])
    file = VerifiedFile(path, sums)
    for start in range(51):
        for length in range(51 - start):
            assert read(file, start, length) == content[start : start + length]
    with pytest.raises(DamagedFile, match="50 bytes; 51 are needed"):
        read(file, 49, 2)

    path.write_bytes(content[:20] + b"x" + content[21:])
    file = VerifiedFile(path, sums)
    assert read(file, 0, 16) == content[:16]
    with pytest.raises(DamagedFile, match="between bytes 16 and 32"):
        file.check_rest()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"bytes": 1},
        {"bytes": 1, "chunk_bytes": 0, "sha256": []},
        {"bytes": 2 * CHUNK_BYTES, "chunk_bytes": CHUNK_BYTES, "sha256": ["a" * 64]},
        {"bytes": 1, "chunk_bytes": CHUNK_BYTES, "sha256": ["a"]},
        {"bytes": "1", "chunk_bytes": CHUNK_BYTES, "sha256": ["a" * 64]},
    ],
)
def test_refuses_what_is_no_checksums(value):
    with pytest.raises(DamagedFile, match="manifest: not valid checksums of a file"):
        Checksums.from_json(value, Path("manifest"))


@pytest.mark.parametrize("chunk_bytes", [1, 4096, 1 << 40])
def test_refuses_chunks_of_a_size_that_nobody_writes(chunk_bytes):
    """A sealed manifest with chunks of one byte kept a start busy for half a minute, without a line."""
    value = {"bytes": 1, "chunk_bytes": chunk_bytes, "sha256": ["a" * 64]}
    with pytest.raises(DamagedFile, match=f"^m: chunk_bytes {chunk_bytes}; must be from 65536 to 67108864$"):
        Checksums.from_json(value, Path("m"))


@pytest.mark.parametrize(
    ("call", "code", "how"), [("open", errno.EIO, "check"), ("preadv", errno.ESTALE, "read")]
)
def test_an_error_that_passes_is_survived_and_one_that_stays_is_no_damage(
    tmp_path, monkeypatch, call, code, how
):
    """A start must not take an older checkpoint because the storage did not answer once."""
    path, content = tmp_path / "file", bytes(range(50))
    sums, real, failures = written(path, [content]), getattr(os, call), []

    def failing(where, *rest):
        if (call == "preadv" or where == path) and failures and failures.pop():
            raise OSError(code, os.strerror(code))
        return real(where, *rest)

    def work():
        file = VerifiedFile(path, sums)
        try:
            if how == "check":
                file.check_rest()
            else:
                assert read(file, 0, 50) == content
        finally:
            file.close()

    monkeypatch.setattr(os, call, failing)
    failures[:] = [True]
    work()
    assert not failures
    failures[:] = [True] * 9
    with pytest.raises(OSError, match=os.strerror(code)) as raised:
        work()
    assert raised.value.filename == str(path)


def test_bytes_that_changed_on_their_way_here_are_read_again(tmp_path, monkeypatch):
    path, content, real, flips = tmp_path / "file", bytes(range(50)), os.preadv, [True]

    def flipping(descriptor, targets, start):
        count = real(descriptor, targets, start)
        if flips:
            flips.pop()
            targets[0][0] ^= 1
        return count

    sums = written(path, [content])
    monkeypatch.setattr(os, "preadv", flipping)
    before = os.listdir("/proc/self/fd")
    file = VerifiedFile(path, sums)
    assert read(file, 0, 50) == content
    assert not flips
    file.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("loss", ["missing", "cut"])
def test_a_file_that_is_lost_while_it_is_read_is_damaged(tmp_path, monkeypatch, loss):
    """The second attempt opens the file anew, and must not turn damage into an error of the storage."""
    path = tmp_path / "file"
    file = VerifiedFile(path, written(path, [bytes(range(50))]))

    def stale(descriptor, targets, start):
        raise OSError(errno.ESTALE, "Stale file handle")

    if loss == "missing":
        path.unlink()
    else:
        path.write_bytes(b"")
    monkeypatch.setattr(os, "preadv", stale)
    with pytest.raises(DamagedFile, match="missing" if loss == "missing" else "0 bytes; 50 were written"):
        file.check_rest()


def test_several_chunks_are_read_at_once(tmp_path, monkeypatch):
    """Each digest waits for another one to begin."""
    found, together, digest = written(tmp_path / "file", [bytes(4 * CHUNK)]), threading.Barrier(2), digest_of

    def waiting(chunk):
        together.wait(timeout=60)
        return digest(chunk)

    monkeypatch.setattr(checksums, "digest_of", waiting)
    with ThreadPoolExecutor(2) as pool:
        verify_file(tmp_path / "file", found, pool.map)


def test_ranges_that_follow_each_other_cost_one_digest_per_chunk(tmp_path, monkeypatch):
    """Shards of many small units lie in the same chunks."""
    path, content = tmp_path / "file", os.urandom(100 * CHUNK + 3)
    sums, digest, counted = written(path, [content]), checksums.digest_of, []

    def count(chunk):
        counted.append(len(chunk))
        return digest(chunk)

    monkeypatch.setattr(checksums, "digest_of", count)
    file, start, found = VerifiedFile(path, sums), 0, b""
    with ThreadPoolExecutor(3) as pool:
        for length in [1, 5, CHUNK, 2 * CHUNK + 1, 3, 7 * CHUNK - 1] * 99:
            target = bytearray(min(length, len(content) - start))
            file.read_into(start, memoryview(target), pool.map)
            start, found = start + len(target), found + target
    assert found == content
    assert len(counted) == 101


def test_few_chunks_are_kept():
    recent = RecentChunks(2)
    for index in range(5):
        recent.put(Path("a"), index, memoryview(bytes([index])))
    assert [recent.get(Path("a"), index) for index in range(3)] == [None] * 3
    assert [bytes(recent.get(Path("a"), index)) for index in (3, 4)] == [b"\3", b"\4"]
    assert recent.get(Path("b"), 4) is None
