"""Reads one rank's micro-batches ahead of the step that needs them."""

import atexit
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.documents import ModelInputs, as_tensors
from megatron_zpp.data.samples import Samples

_PREFETCH = 4  # micro-batches that each worker reads ahead
_LOOK_AT_PARENT = 0.5  # seconds between two looks

# What a terminal, a scheduler or `timeout` sends to every process of a job: the rank alone decides.
_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class MicroBatches:
    """One rank's micro-batches, each (B, S + 1) int64 in CPU memory, in the order of its schedule.

    Where documents are told apart, each is the tensors of documents.ModelInputs instead.

    `iter()` starts at the sample `consumed`, each time anew; iteration ends before the step that would go
    past sample `end`, or never. With `num_workers` processes that read ahead, which outlive an iteration;
    with 0 in this process. `pin_memory` puts batches where a GPU can fetch them asynchronously.

    Use it in a `with` block or call `close`; leaving the process closes it too. Raises ValueError as
    `samples` does, wherever it was read.
    """

    def __init__(
        self,
        samples: Samples,
        schedule: BatchSchedule,
        *,
        rank: int,
        consumed: int = 0,
        end: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        assert 0 <= rank < schedule.data_parallel_size, f"rank {rank} of {schedule.data_parallel_size}"
        self._loader = _Loader(
            _Ranges(samples),
            sampler=_Reads(schedule, rank, consumed, end),
            collate_fn=_unchanged,
            batch_size=None,  # what the sampler names is a micro-batch already
            num_workers=num_workers,
            prefetch_factor=_PREFETCH if num_workers else None,
            persistent_workers=num_workers > 0,
            worker_init_fn=_prepare_worker,
            generator=torch.Generator(),  # or each start would advance the generator that dropout uses
        )
        self._pin_memory = pin_memory
        self._batches: Iterator[np.ndarray | ModelInputs | str] | None = None
        # Before multiprocessing's own exit handler, which would wait for workers that ignore SIGTERM.
        atexit.register(self.close)

    def __iter__(self) -> "MicroBatches":
        self._batches = iter(self._loader)
        return self

    def __next__(self) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        assert self._batches is not None, "iter() comes first, and close() last"
        batch = next(self._batches)
        if isinstance(batch, str):
            raise ValueError(batch)
        tensors = as_tensors(batch)
        if not self._pin_memory:
            return tensors
        if isinstance(tensors, torch.Tensor):
            return tensors.pin_memory()
        return tuple(None if tensor is None else tensor.pin_memory() for tensor in tensors)

    def close(self) -> None:
        """Ends the workers; may be called again."""
        atexit.unregister(self.close)
        batches, self._batches = self._batches, None
        if self._loader.num_workers and batches is not None:
            _kill_workers(batches)

    def __enter__(self) -> "MicroBatches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Reads:
    """(first sample, number of samples) of each micro-batch of a rank, in the order of the steps."""

    schedule: BatchSchedule
    rank: int
    consumed: int
    end: int | None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        consumed = self.consumed
        while True:
            after = consumed + self.schedule.global_batch_size_at(consumed)
            if self.end is not None and after > self.end:
                return
            for index in range(self.schedule.micro_batches_at(consumed)):
                yield self.schedule.micro_batch(consumed, index, self.rank)
            consumed = after


class _Loader(DataLoader):
    def check_worker_number_rationality(self) -> None:
        """Not a warning on every rank that a job gives one core: workers wait for files and for the rank."""


class _Ranges(Dataset):
    """Ranges of samples.

    They travel as arrays, through a pipe: a tensor would need shared memory, which containers ration, and a
    connection for each batch, which took three times as long with torch 2.13. A refusal travels as its text:
    torch would wrap the exception in the worker's traceback.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, read: tuple[int, int]) -> np.ndarray | ModelInputs | str:
        first, count = read
        try:
            return self._samples.batch(np.arange(first, first + count))
        except ValueError as error:
            return str(error)


def _kill_workers(batches: Any) -> None:
    """Ends torch's iterator over worker processes by force, in bounded time: they only read.

    The documented way, dropping the last reference, fails when a traceback still holds one. torch's own way
    talks to the workers through queues and an event, whose locks a worker, or an exception of a signal here,
    may have left taken; and it waits 10 s for each that does not answer.
    """
    if batches._worker_pids_set:  # or torch takes their deaths for an error, and raises it anywhere
        _remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    batches._shutdown = True  # what torch would do when the iterator goes is done here
    for worker in batches._workers:
        worker.kill()
    for worker in batches._workers:
        worker.join()
    for queue in (*batches._index_queues, batches._worker_result_queue):
        queue.cancel_join_thread()
        queue.close()


def _unchanged(batch: Any) -> Any:
    return batch


def _prepare_worker(worker: int) -> None:
    threading.Thread(target=_end_with_parent, name="end with the rank", daemon=True).start()
    for number in _GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_with_parent() -> None:
    """Ends this worker when the rank was killed.

    torch's worker sees that too, but only between its tasks, and then waits for ever for a reader of what it
    has in its pipe, whose other end its siblings hold open.
    """
    rank = multiprocessing.parent_process()
    while rank is not None and os.getppid() == rank.pid:
        time.sleep(_LOOK_AT_PARENT)
    os._exit(1)
