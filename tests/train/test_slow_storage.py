"""Storage that is slow, full or does not answer, on all ranks alike; and what saves that have ended leave."""

import errno
import os
import re
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.faults.engines import FLAGS, train
from megatron_zpp.checkpoint import together, write
from megatron_zpp.checkpoint.directory import candidates
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.write import SaveFailed
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.root import Config, parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.reporting.reporter import Reporter
from megatron_zpp.storage.checksums import VerifiedFile
from megatron_zpp.train.saving.saver import Saver
from megatron_zpp.zero.engine import ZeroEngine
from tests.checkpoint.saving import TOKENIZER, restored, save, small
from tests.faults.held import in_use
from tests.zero.ranks import on_ranks

LIMIT = 60  # seconds that a test waits for what must come soon
IMPATIENT = ["--heartbeat-timeout", "1", "--distributed-timeout-minutes", "0.05"]
WARM_UP, SAVES = 3, 6
LEAK = 16 * 2**10  # bytes per save on a rank; less is hard to tell from noise in so few saves
PATIENT = ("--distributed-timeout-minutes", "0.1")  # more than a busy machine takes between two chunks


def config_of(*flags: str) -> Config:
    return parse_args([*FLAGS, *IMPATIENT, *flags])


def outcome_of(topology: Topology, directory: str, stuck: int, where: str) -> str:
    """How a load ends on a rank; that of rank `stuck` never reads a chunk, or never sees the directory."""
    engine, over = small(topology=topology, zero_stage=3), threading.Event()
    save(Path(directory), engine, config=config_of().to_json())
    load, listed = VerifiedFile._load, together.candidates

    def wait_and_load(file: VerifiedFile, *arguments: Any) -> None:
        over.wait(LIMIT)
        load(file, *arguments)

    def wait_and_list(*arguments: Any) -> list[Path]:
        over.wait(LIMIT)
        return listed(*arguments)

    if topology.rank == stuck and where == "directory":
        together.candidates = wait_and_list
    elif topology.rank == stuck:
        VerifiedFile._load = wait_and_load
    try:
        return str(restored(engine, *IMPATIENT, "--load", directory).progress.iteration)
    except ValueError as error:
        return str(error)
    finally:
        over.set()
        VerifiedFile._load, together.candidates = load, listed


@pytest.mark.parametrize(("stuck", "where"), [(1, "file"), (0, "directory")])
def test_a_load_that_gets_stuck_ends_in_one_line_on_all_ranks(tmp_path: Path, stuck: int, where: str) -> None:
    said = on_ranks(2, outcome_of, str(tmp_path), stuck, where)
    assert len(set(said)) == 1
    assert said[0].startswith(f"--load {tmp_path}: ")
    assert said[0].endswith("if it is only slow")
    assert " progress for 0:00:03; start again when the storage answers" in said[0]
    if stuck == 1:
        assert f": rank {stuck} " in said[0]


class Quiet(Reporter):
    """Collects the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(text)


def saver_of(engine: ZeroEngine, config: Config, reporter: Reporter, store: dist.Store) -> Saver:
    """As a run has it."""
    ranks, start = SimpleNamespace(store=store, lease=None), Progress()
    run = {"engine": engine, "config": config, "reporter": reporter, "ranks": ranks, "start": start}
    return Saver(SimpleNamespace(**run, tokenizer=TOKENIZER, tokenizer_files={}))


def train_beside_a_slow_save(topology: Topology, directory: str) -> tuple[int, list[str]]:
    """Iterations taken while rank 1 writes, which it does until it sees all ranks after iteration 4."""
    engine, written = small(topology=topology, zero_stage=3), write.write_shard_file
    config = config_of("--save", directory, "--async-save", *PATIENT)

    def slowly(path: Path, tensors: Any, on_progress: Any) -> Any:
        deadline = time.monotonic() + LIMIT
        while topology.rank == 1 and not all(
            (Path(directory) / f"after_4_{rank}").exists() for rank in (0, 1)
        ):
            assert time.monotonic() < deadline, "the training waits for the save"
            on_progress()
            time.sleep(0.05)
        return written(path, tensors, on_progress)

    write.write_shard_file = slowly
    reporter = Quiet()
    saver = saver_of(engine, config, reporter, dist.distributed_c10d._get_default_store())
    saver.save(Progress(1, 1))
    for _ in range(4):
        saver.before_step()
        train(engine, seed=3)
        saver.after_step()
    in_time = len(reporter.lines)
    (Path(directory) / f"after_4_{topology.rank}").touch()
    saver.finish()
    return in_time, [line.split(" in ")[0] for line in reporter.lines]


def test_training_goes_on_while_one_rank_still_writes(tmp_path: Path) -> None:
    """Longer than the time-out without progress, because the rank makes progress."""
    saved = f" saved {tmp_path}/iter_0000001"
    assert on_ranks(2, train_beside_a_slow_save, str(tmp_path)) == [(0, [saved])] * 2
    assert [path.name for path in candidates(str(tmp_path))] == ["iter_0000001"]


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
    written, keys = write.write_shard_file, []

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for number in range(failures + 2):
        fails = 0 < number <= failures and topology.rank == 1
        write.write_shard_file = fail if fails else written
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
    return reporter.lines, one_line(failed.value)


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
