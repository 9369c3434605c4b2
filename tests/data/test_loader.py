"""The loader: one order for any number of ranks, resumable anywhere, and workers that end quietly."""

import contextlib
import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.mock import MockDataset
from megatron_zpp.data.windows import WindowDataset
from tests.support import ended, refusal, wait_until

RAMP = (12, 12, 60)


def windows(prefix, seq_length=4, vocab_size=65536):
    source = IndexedDataset(prefix)
    return WindowDataset(source, 0, source.num_tokens, seq_length, vocab_size, seed=7)


def steps(samples, world, *, consumed=0, end=240, num_workers=0):
    """Return [(samples consumed before, global batch in sample order)] over all ranks."""
    schedule = BatchSchedule(1, 24, world, RAMP)
    loaders = [
        MicroBatches(samples, schedule, rank=rank, consumed=consumed, end=end, num_workers=num_workers)
        for rank in range(world)
    ]
    streams, result = [list(loader) for loader in loaders], []
    for loader in loaders:
        loader.close()
    while any(streams):
        count = schedule.micro_batches_at(consumed)
        rows = [streams[rank].pop(0) for _ in range(count) for rank in range(world)]
        result.append((consumed, torch.cat(rows).tolist()))
        consumed += schedule.global_batch_size_at(consumed)
    return result


@pytest.fixture
def text(by_hand):
    return windows(by_hand("x", [list(range(40 * n, 40 * n + 40)) for n in range(20)]))


def test_resuming_at_any_step_with_any_world_continues_with_the_same_batches(text):
    whole = steps(text, 1)
    assert [len(rows) for _, rows in whole][:7] == [12, 12, 12, 12, 12, 24, 24]
    assert steps(text, 3) == steps(text, 1, num_workers=2) == whole
    for number, (consumed, _) in enumerate(whole):
        assert steps(text, 1 + number % 4, consumed=consumed) == whole[number:]


def test_batches_are_int64_and_iteration_restarts(text):
    with MicroBatches(text, BatchSchedule(3, 6, 2), rank=1, end=25, num_workers=1) as batches:
        first = list(batches)
        next(iter(batches))  # left half-way
        assert len(first) == 4  # a remainder below a global batch is not read
        assert all(batch.shape == (3, 5) and batch.dtype == torch.int64 for batch in first)
        assert torch.equal(torch.stack(list(batches)), torch.stack(first))


def test_global_random_state_is_left_alone(text):
    before = torch.get_rng_state()
    for num_workers in (0, 1):
        with MicroBatches(text, BatchSchedule(1, 1, 1), rank=0, num_workers=num_workers) as batches:
            next(iter(batches))
    assert torch.equal(torch.get_rng_state(), before)


class Unreadable:
    """A source on a disk that has failed."""

    def batch(self, indices):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "x.bin")


class Short:
    """A user's two samples, which a slice takes."""

    def batch(self, indices):
        return (np.zeros((2, 3))[indices[0] : indices[-1] + 1],)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_arrives_as_one_plain_line(by_hand, num_workers):
    for samples, message in (
        (windows(by_hand("x", [[5] * 99]), vocab_size=5), r"x\.bin: byte \d+: token \d+ is 5, outside"),
        (Unreadable(), r"^x\.bin: Input/output error; check the data .* again$"),
        (Short(), r"^batch of samples 2 to 2: has 0 rows; must have one per index$"),
    ):
        schedule = BatchSchedule(1, 1, 1)
        with MicroBatches(samples, schedule, rank=0, consumed=2, num_workers=num_workers) as batches:
            said = refusal(next, iter(batches))
            assert re.search(message, said)
            assert "worker" not in said


def workers_of(process_id):
    path = f"/proc/{process_id}/task/{process_id}/children"
    return [int(child) for child in open(path).read().split()] if os.path.exists(path) else []


RUN = """
import signal
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.mock import MockDataset
# Half a MiB, which fills a pipe: who writes to it waits for a reader.
batches = MicroBatches(MockDataset(1 << 16, 100, 0), BatchSchedule(1, 1, 1), rank=0, num_workers=2)
stream = iter(batches)
next(stream)
seen = []
try:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: seen.append(number))
    print("running", flush=True)
    while len(seen) < 4:
        next(stream)
    for _ in range(100):  # more than was read ahead
        next(stream)
    print("read on", flush=True)
    for _ in stream:
        pass
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture
def started():
    """Start RUN and return the process and its workers; kill them after a failed test."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "running\n"
    workers = workers_of(process.pid)
    wait_until(lambda: all(ignores(worker, signal.SIGUSR2) for worker in workers))  # the last one set
    yield process, workers
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ignores(process_id, number):
    with open(f"/proc/{process_id}/status") as status:
        return int(re.search(r"SigIgn:\s*(\w+)", status.read())[1], 16) >> (number - 1) & 1


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
def test_signals_to_the_whole_job_are_the_parents_alone_and_leave_no_worker(started):
    process, workers = started
    assert len(workers) >= 2
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.killpg(process.pid, number)
    assert process.stdout.readline() == "read on\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)
    wait_until(lambda: all(map(ended, workers)))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
def test_workers_end_when_the_rank_is_killed(started):
    process, workers = started
    process.kill()
    process.communicate()
    wait_until(lambda: all(map(ended, workers)))


def test_close_ends_a_worker_that_does_not_answer():
    batches = MicroBatches(MockDataset(16, 100, 0), BatchSchedule(1, 1, 1), rank=0, num_workers=1)
    next(iter(batches))
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGSTOP)
    batches._batches._index_queues[0]._notempty.acquire()  # as a Ctrl-C in its put can leave it
    batches.close()
    assert not worker.is_alive()
    batches.close()
