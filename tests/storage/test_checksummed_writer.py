"""Files written by several threads: their bytes and digests, what may change meanwhile, and full disks."""

import errno
import hashlib
import os
import threading
import time

import pytest

from megatron_zpp.storage import checksummed_writer
from megatron_zpp.storage.checksummed_writer import ChecksummedWriter
from megatron_zpp.storage.checksums import CHUNK_BYTES, checksums_of, thread_count

CHUNK = 16


def test_several_chunks_are_written_at_once(tmp_path, monkeypatch):
    """Each chunk waits for another one to begin."""
    together, write = threading.Barrier(2), checksummed_writer.write_and_digest

    def waiting(file, first, chunk):
        together.wait(timeout=60)
        return write(file, first, chunk)

    monkeypatch.setattr(checksummed_writer, "write_and_digest", waiting)
    content = bytes(range(4 * CHUNK))
    writer = ChecksummedWriter(tmp_path / "file", CHUNK)
    writer.write(content)
    assert writer.finish().digests == tuple(
        hashlib.sha256(content[first : first + CHUNK]).hexdigest() for first in range(0, 4 * CHUNK, CHUNK)
    )
    assert (tmp_path / "file").read_bytes() == content


def test_the_caller_may_change_its_memory_once_it_is_written(tmp_path, monkeypatch):
    write = checksummed_writer.write_and_digest

    def late(file, first, chunk):
        time.sleep(0.02)
        return write(file, first, chunk)

    monkeypatch.setattr(checksummed_writer, "write_and_digest", late)
    writer, memory = ChecksummedWriter(tmp_path / "file", CHUNK), bytearray(range(5 * CHUNK // 2))
    for _ in range(3):
        writer.write(memory)
        memory[:] = bytes(len(memory))
    found = writer.finish()
    assert found == checksums_of(tmp_path / "file", CHUNK)
    part = bytes(range(5 * CHUNK // 2))
    assert (tmp_path / "file").read_bytes() == part + 2 * bytes(len(part))


def test_a_writer_holds_few_chunks(tmp_path, monkeypatch):
    """Memory that is faster than the file must not fill with chunks that wait."""
    write, lock, alive, most = checksummed_writer.write_and_digest, threading.Lock(), 0, 0

    def late(file, first, chunk):
        nonlocal alive
        time.sleep(0.005)
        with lock:
            alive -= 1
        return write(file, first, chunk)

    put = ChecksummedWriter._put

    def counting(self, chunk):
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        put(self, chunk)

    monkeypatch.setattr(checksummed_writer, "write_and_digest", late)
    monkeypatch.setattr(ChecksummedWriter, "_put", counting)
    writer = ChecksummedWriter(tmp_path / "file", CHUNK)
    for _ in range(60):
        writer.write(bytes(CHUNK - 1))  # smaller than a chunk, so that the writer copies it
    writer.finish()
    assert 1 < most <= 2 * thread_count() + 1


def test_a_file_of_many_pieces_starts_and_flushes(tmp_path, monkeypatch):
    """With limits that this file passes many times, short writes, and another size at every write."""
    pwrite, flushed, fdatasync = os.pwrite, [], os.fdatasync

    def short(file, piece, offset):
        return pwrite(file, piece[: max(1, len(piece) * 2 // 3)], offset)

    def flush(file):
        flushed.append(os.fstat(file).st_size)
        fdatasync(file)

    monkeypatch.setattr(checksummed_writer, "_START_BYTES", 2 * CHUNK_BYTES)
    monkeypatch.setattr(checksummed_writer, "_FLUSH_BYTES", 3 * CHUNK_BYTES)
    monkeypatch.setattr(os, "pwrite", short)
    monkeypatch.setattr(os, "fdatasync", flush)
    content = os.urandom(7 * CHUNK_BYTES + 12345)
    writer, at = ChecksummedWriter(tmp_path / "file"), 0
    for size in (8, 300_000, 3 * CHUNK_BYTES, 1, len(content)):
        writer.write(content[at : at + size])
        at += size
    found = writer.finish()
    assert (tmp_path / "file").read_bytes() == content
    assert found == checksums_of(tmp_path / "file")
    assert len(flushed) == 2
    assert all(size >= least * CHUNK_BYTES for size, least in zip(flushed, (3, 6), strict=True))


@pytest.mark.parametrize("failing", [0, 1, 5])
def test_an_error_of_any_chunk_is_raised(tmp_path, monkeypatch, failing):
    pwrite = os.pwrite

    def full(file, piece, offset):
        if offset == failing * CHUNK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, piece, offset)

    monkeypatch.setattr(os, "pwrite", full)
    writer = ChecksummedWriter(tmp_path / "file", CHUNK)

    def write_all():
        for _ in range(6):
            writer.write(bytes(CHUNK))
        writer.finish()

    with pytest.raises(OSError, match="No space left"):
        write_all()
    writer.close()
