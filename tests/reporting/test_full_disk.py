"""A log on a disk that is full: lines are lost, and nothing else."""

import errno
import io
import os
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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_line_that_was_cut_is_ended_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The disk takes a part of a line; afterwards it is full, and then it is not."""
    log, write, room = tmp_path / "log", os.write, [15]

    def until_full(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(number, os.strerror(number))
        room[0] -= (written := write(descriptor, data[: room[0]]))
        return written

    with log.open("ab") as file:
        stream = stream_to(file.fileno())
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", until_full)
            for letter in "abcd":
                print(letter * 9, file=stream, flush=True)
        print("e", file=stream, flush=True)
    assert log.read_text() == "a" * 9 + "\n" + "b" * 5 + NOTICE + "e\n"
