"""Opening by name: regular files alone, at once, and no more of them than the limit."""

import errno
import os
import socket
from pathlib import Path

import pytest

from megatron_zpp.storage.regular import UnfitFile, open_regular, open_stream, read_limited


def test_reads_up_to_the_limit_and_through_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"12345")
    link.symlink_to(path)
    assert read_limited(link, 5) == read_limited(path, 6) == b"12345"
    with pytest.raises(UnfitFile, match="is longer than 4 bytes") as raised:
        read_limited(path, 4)
    assert raised.value.filename == str(path)
    with open_stream(path) as file:
        assert file.read() == b"12345"
    descriptor = open_regular(path)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    path.write_bytes(b"")
    assert read_limited(path, 0) == b""


def test_an_error_that_passes_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests and the states of runs are read this way, by all ranks."""
    path, real, failures = tmp_path / "file", os.fstat, [True]
    path.write_bytes(b"12345")

    def failing(descriptor: int) -> os.stat_result:
        if failures:
            failures.pop()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", failing)
        assert read_limited(path, 5) == b"12345"
        failures[:] = [True] * 2
        with pytest.raises(OSError, match="Stale file handle") as raised:
            read_limited(path, 5)
    assert raised.value.filename == str(path)


def test_a_regular_file_whose_size_is_not_known_has_a_limit_too() -> None:
    assert read_limited("/proc/self/status", 1 << 20)
    with pytest.raises(UnfitFile, match="is longer than 10 bytes"):
        read_limited("/proc/self/status", 10)


def test_anything_else_is_refused_at_once(tmp_path: Path) -> None:
    """Opening a FIFO for reading waits for a writer; /dev/zero never ends."""
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(tmp_path / "socket"))
    for path, words in {
        tmp_path / "fifo": "is a FIFO, not a regular file",
        tmp_path / "socket": "is a socket, not a regular file",
        tmp_path: "is a directory",
        Path("/dev/zero"): "is a character device, not a regular file",
    }.items():
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(UnfitFile, match=words):
            read_limited(path, 100)
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")
