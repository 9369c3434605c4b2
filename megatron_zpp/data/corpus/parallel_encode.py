"""Encodes files of JSON lines by several processes, in the order of the input and with bounded memory.

One thread that reads, decompresses, distributes and writes keeps dozens of workers busy.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar

from megatron_zpp.data.corpus.encode import Encoded, Encoder
from megatron_zpp.data.corpus.inputs import Block, read_blocks
from megatron_zpp.data.corpus.problems import Problem

Item = TypeVar("Item")
Result = TypeVar("Result")

_BLOCK_BYTES = 256 << 10  # large enough to hide the cost of sending it, small enough to balance the load
_AHEAD = 6  # items per worker, in work or finished: one slow item does not stop the other workers
_function: Callable[[Any], Any] | None = None  # of this worker, once it has built it


def encode_files(
    files: Sequence[str], build: Callable[[], Encoder], workers: int
) -> Iterator[tuple[Encoded, Block, Callable[[Problem], str]]]:
    """Yield all blocks of the files, encoded by `workers` processes, and what locates a problem of the block.

    Raises like read_blocks, ordered_map.
    """
    distributed: deque[tuple[str, Block]] = deque()

    def contents() -> Iterator[bytes]:
        for path in files:
            for block in read_blocks(path, _BLOCK_BYTES):
                distributed.append((path, block))
                yield block.content

    current, lines = "", 0
    with contextlib.closing(ordered_map(build, contents(), workers)) as results:
        for encoded in results:
            path, block = distributed.popleft()
            if path != current:
                current, lines = path, 0
            yield encoded, block, partial(_line_of, path, lines)
            lines += encoded.lines


def _line_of(path: str, lines_before: int, problem: Problem) -> str:
    return f"{path} line {lines_before + problem.line}"


def ordered_map(
    build: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yield the result of every item, in the order of the items.

    `build` (picklable) is called once in each worker and returns the function. Items are drawn as workers
    take them, so memory holds a few items per worker. Close the generator to end the workers early. Raises
    ChildProcessError if a worker dies, and RuntimeError with a traceback if `build` or the function raises.
    """
    # spawn, not fork: locks of other threads are not copied, and siblings do not hold pipes open
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _watch_parent)
    pending = deque[Future[Result]]()
    try:
        for item in items:
            with _interrupts_held():
                pending.append(pool.submit(_work, build, item))
            if len(pending) == workers * _AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise ChildProcessError("a worker process has died; the machine may have run out of memory") from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block Ctrl-C in processes started in this context: the terminal signals all, but the parent decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch_parent() -> None:
    """End this worker when its parent has ended, which it would not notice while it waits for an item."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _work(build: Callable[[], Callable[[Any], Any]], item: Any) -> Any:
    global _function
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # worker processes use all cores already
    try:
        _function = _function or build()
        return _function(item)
    except Exception:
        raise RuntimeError(f"in a worker process:\n{traceback.format_exc()}") from None
