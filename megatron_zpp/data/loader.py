"""Reads one rank's micro-batches ahead of the steps that need them."""

import atexit
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from megatron_zpp.config.command_line import one_line
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.documents import ModelInputs, as_tensors
from megatron_zpp.data.samples import BatchSource

_PREFETCH = 4  # micro-batches that each worker reads ahead
_PARENT_POLL = 0.5  # seconds between checks that the rank is alive

# Sent by a terminal, a scheduler or `timeout` to every process of a job; only the rank reacts.
_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class MicroBatches:
    """One rank's micro-batches, each (B, S + 1) int64 in CPU memory, in the order of its schedule.

    With document masks, each is a tuple of tensors in the order of documents.ModelInputs instead.

    Every `iter()` starts at sample `consumed`. Iteration ends before the step that would exceed sample `end`;
    it never ends if `end` is None. `num_workers` processes read ahead and outlive an iteration; with 0, this
    process reads. `pin_memory` places batches in memory that a GPU can fetch asynchronously.

    Use it in a `with` block or call `close`; it is also closed when the process exits. Raises the ValueError
    of `samples`, and a ValueError for its OSError, whichever process read them.
    """

    def __init__(
        self,
        samples: BatchSource,
        schedule: BatchSchedule,
        *,
        rank: int,
        consumed: int = 0,
        end: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self._loader = _Loader(
            _Ranges(samples),
            sampler=_Reads(schedule, rank, consumed, end),
            collate_fn=_unchanged,
            batch_size=None,  # the sampler's items are micro-batches
            num_workers=num_workers,
            prefetch_factor=_PREFETCH if num_workers else None,
            persistent_workers=num_workers > 0,
            worker_init_fn=_prepare_worker,
            generator=torch.Generator(),  # otherwise each start would advance dropout's generator
        )
        self._pin_memory = pin_memory
        self._batches: Iterator[np.ndarray | ModelInputs | str] | None = None
        # Runs before multiprocessing's exit handler, which would wait for workers that ignore SIGTERM.
        atexit.register(self.close)

    def __iter__(self) -> "MicroBatches":
        self._batches = iter(self._loader)
        return self

    def __next__(self) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        assert self._batches is not None, "call iter() first, and do not read after close()"
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
        """End the workers; may be called repeatedly."""
        atexit.unregister(self.close)
        batches, self._batches = self._batches, None
        if self._loader.num_workers and batches is not None:
            _kill_workers(batches)

    def __enter__(self) -> "MicroBatches":
        return self

    def __exit__(self, *exception: object) -> None:
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
        """Omit the warning on ranks with one core: workers mostly wait for files and for the rank."""


@dataclass(frozen=True)
class _Ranges(Dataset):
    """Ranges of samples.

    Batches are sent as arrays through a pipe: tensors would need shared memory, which containers limit, and a
    connection per batch, which took three times as long with torch 2.13. A ValueError or OSError is sent as
    its text, because torch would wrap the exception in the worker's traceback.
    """

    samples: BatchSource

    def __getitem__(self, read: tuple[int, int]) -> np.ndarray | ModelInputs | str:
        first, count = read
        try:
            batch = self.samples.batch(np.arange(first, first + count))
        except ValueError as error:
            return str(error)
        except OSError as error:
            return f"{one_line(error)}; check the data and its file system, and start the run again"
        rows = len(batch if isinstance(batch, np.ndarray) else batch[0])
        said = f"batch of samples {first} to {first + count - 1}: has {rows} rows; must have one per index"
        return batch if rows == count else said  # a slice past the end has none, of which a mean is NaN


def _kill_workers(batches: Any) -> None:
    """Kill the workers of torch's iterator, in bounded time; nothing is lost, because they only read.

    The documented method, dropping the last reference, fails while a traceback still holds one. torch's
    internal shutdown uses queues and an event, whose locks a worker, or a signal in this process, may have
    left locked; and it waits 10 s for each worker that does not respond.
    """
    if batches._worker_pids_set:  # otherwise torch's signal handler raises an error for their deaths
        _remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    batches._shutdown = True  # so that torch does not shut down again when the iterator is deleted
    for worker in batches._workers:
        worker.kill()
    for worker in batches._workers:
        worker.join()
    for queue in (*batches._index_queues, batches._worker_result_queue):
        queue.cancel_join_thread()
        queue._notempty.acquire(timeout=1.0)  # which closing takes: Ctrl-C in a put may have left it locked
        queue._notempty.release()
        queue.close()


def _unchanged(batch: Any) -> Any:
    return batch


def _prepare_worker(worker: int) -> None:
    threading.Thread(target=_end_with_parent, name="end with the rank", daemon=True).start()
    for number in _GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_with_parent() -> None:
    """End this worker after the rank was killed.

    torch's worker also notices, but only between tasks. It then waits forever for a reader of its pipe, whose
    other end its siblings hold open.
    """
    rank = multiprocessing.parent_process()
    while rank is not None and os.getppid() == rank.pid:
        time.sleep(_PARENT_POLL)
    os._exit(1)
