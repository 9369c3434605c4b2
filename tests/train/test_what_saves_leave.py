"""What saves that have ended leave: nothing in the store or in memory, and one line if the disk was full."""

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.checkpoint import write as write_module
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.write import SaveFailed
from megatron_zpp.distributed.topology import Topology
from tests.checkpoint.saving import small
from tests.faults.held import in_use
from tests.train.test_slow_storage import Quiet, config_of, saver_of
from tests.zero.ranks import on_ranks

WARM_UP, SAVES = 3, 6
LEAK = 16 * 2**10  # bytes per save on a rank; less is hard to tell from noise in so few saves


def save_again_and_again(topology: Topology, directory: str, *flags: str) -> tuple[list[int], list[int]]:
    """The keys in the store and the bytes in use on this rank, after each save."""
    store = dist.distributed_c10d._get_default_store()
    engine = small(topology=topology, zero_stage=3)
    saver = saver_of(engine, config_of("--save", directory, "--keep-last", "1", *flags), Quiet(), store)
    keys, used = [], []
    for number in range(1, WARM_UP + SAVES + 1):
        saver.save(Progress(number, number))
        saver.before_step()
        saver._wait()
        dist.barrier()
        keys.append(store.num_keys())
        used.append(in_use()["malloc_bytes"])
        dist.barrier()
    saver.finish()
    return keys, used


@pytest.mark.parametrize("flags", [(), ("--async-save",)], ids=["waiting", "async"])
def test_nothing_is_left_of_saves(tmp_path: Path, flags: tuple[str, ...]) -> None:
    for keys, used in on_ranks(2, save_again_and_again, str(tmp_path), *flags):
        assert keys[-1] - keys[WARM_UP - 1] < SAVES, keys  # two more if ranks waited long in the last save
        assert used[-1] - used[WARM_UP - 1] < SAVES * LEAK, used


def save_around_failures(topology: Topology, directory: str, failures: int) -> tuple[int, int]:
    """The keys in the store after a save, and after another with failures of rank 1's disk in between."""
    store = dist.distributed_c10d._get_default_store()
    engine = small(topology=topology, zero_stage=3)
    saver = saver_of(engine, config_of("--save", directory), Quiet(), store)
    write, keys = write_module.write_shard_file, []

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for number in range(failures + 2):
        fails = 0 < number <= failures and topology.rank == 1
        write_module.write_shard_file = fail if fails else write
        saver.save(Progress(number + 1, number + 1))
        dist.barrier()
        keys.append(store.num_keys())
        dist.barrier()
    saver.finish()
    return keys[0], keys[-1]


def test_a_save_deletes_what_failed_ones_left(tmp_path: Path) -> None:
    """A failed save leaves a key of each rank, because rank 0 may still wait for it."""
    failures = 4
    for before, after in on_ranks(2, save_around_failures, str(tmp_path), failures):
        assert after - before < failures  # one or two more if ranks waited long in the last save


def save_to_a_full_disk(topology: Topology, directory: str) -> tuple[list[str], str]:
    """The warnings of a rank, and what ends the run, where each save finds too little space."""
    store, reporter = dist.distributed_c10d._get_default_store(), Quiet()
    saver = saver_of(small(topology=topology, zero_stage=3), config_of("--save", directory), reporter, store)
    for iteration in (1, 2, 2):  # the end of a run saves again what was not saved
        saver.save(Progress(iteration, iteration))
        if iteration == 1:
            saver.before_step()
    with pytest.raises(SaveFailed) as failed:
        saver.finish()
    return reporter.lines, str(failed.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_full_disk_is_said_once_with_the_bytes_needed_and_free(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk], check=True)
    try:
        results = on_ranks(2, save_to_a_full_disk, str(disk))
    finally:
        subprocess.run(["umount", disk], check=True)
    full = rf"{disk}/iter_000000%d: No space left on device: it needs ([\d,]+) bytes, and ([\d,]+) are free"
    for warnings, end in results:
        (warning,) = warnings
        assert re.fullmatch(rf"a checkpoint could not be saved: {full % 1}; .*; training continues", warning)
        found = re.fullmatch(full % 2, end)
        assert found
        needed, free = (int(number.replace(",", "")) for number in found.groups())
        assert free <= 32 * 2**10 < needed
