"""Reads of all ranks together: what one rank finds, all ranks know, and only damage lets an older file in."""

import errno
import platform
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.manifest import MANIFEST
from megatron_zpp.checkpoint.together import read_together
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.checksums import DamagedFile, OnProgress
from megatron_zpp.storage.regular import UnfitFile

RANKS = 3


def together(error: Exception) -> list[Any]:
    """What each of three ranks returns or raises if the last one has an error."""
    store = dist.HashStore()

    def rank(number: int) -> Any:
        def work(on_progress: OnProgress) -> int:
            if number == RANKS - 1:
                raise error
            return number

        exchange = Exchange(store, Topology(number, RANKS, number, RANKS), timedelta(seconds=60), "load")
        try:
            return read_together(work, exchange, FileWorker(), "--load", "here")
        except ValueError as raised:
            return str(raised)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (OSError(errno.EIO, "Input/output error", "file"), "start again once it can be read"),
        (OSError(errno.ESTALE, "Stale file handle", "file"), "start again once it can be read"),
        (PermissionError(errno.EACCES, "Permission denied", "file"), "let the user of the run read it"),
    ],
)
def test_storage_that_does_not_answer_a_rank_ends_the_start_of_all(error: OSError, fix: str) -> None:
    where = f"rank 2 on {platform.node()}"
    assert together(error) == [f"--load here: {where}: file: {error.strerror}; {fix}"] * RANKS


@pytest.mark.parametrize(
    "error",
    [
        DamagedFile("file: 3 bytes; 4 were written"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", f"iter_0000001/{MANIFEST}"),
        UnfitFile(errno.EINVAL, "is a FIFO", "file"),
    ],
)
def test_damage_that_a_rank_finds_is_known_to_all_ranks(error: Exception) -> None:
    problems = [problem for _, problem in together(error)]
    assert problems == problems[:1] * RANKS
    assert "file" in problems[0].lower() or MANIFEST in problems[0]
