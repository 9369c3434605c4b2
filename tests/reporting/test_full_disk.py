"""A log on a disk that is full: lines are lost, and nothing else."""

import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_zpp.reporting.full_disk import LogFile

NOTICE = "\n WARNING: lines of this log are lost, because the disk was full\n"


@pytest.fixture
def descriptor() -> Iterator[int]:
    """Of a full device."""
    number = os.open("/dev/full", os.O_WRONLY)
    yield number
    os.close(number)


def stream_to(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(LogFile(descriptor, " WARNING")))


def free(descriptor: int, path: Path) -> None:
    """From now on there is space: the descriptor is that of a file."""
    with path.open("ab") as file:
        os.dup2(file.fileno(), descriptor)


def test_lost_lines_are_said_once_there_is_space_again(descriptor: int, tmp_path: Path) -> None:
    log, stream = tmp_path / "log", stream_to(descriptor)
    for line in ("one", "two"):
        print(line, file=stream, flush=True)
    free(descriptor, log)
    for line in ("three", "four"):
        print(line, file=stream, flush=True)
    assert log.read_text() == NOTICE + "three\nfour\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_line_that_was_cut_is_ended_first(tmp_path: Path) -> None:
    """The disk takes a part of a line; afterwards it is full, and then it is not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", disk], check=True)
    try:
        log, other = disk / "log", disk / "other"
        other.write_bytes(bytes(4096))
        number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        stream = stream_to(number)
        for letter in "abcd":
            print(letter * 2999, file=stream, flush=True)
        assert log.read_text() == "a" * 2999 + "\n" + "b" * 1096
        other.unlink()
        print("e", file=stream, flush=True)
        os.close(number)
        assert log.read_text() == "a" * 2999 + "\n" + "b" * 1096 + NOTICE + "e\n"
    finally:
        subprocess.run(["umount", disk], check=True)
