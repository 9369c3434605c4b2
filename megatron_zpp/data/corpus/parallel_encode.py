"""Encodes files of JSON lines by several processes, in the order of the input and with bounded memory.

One thread that reads, decompresses, distributes and writes keeps dozens of workers busy.
"""

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import count, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from megatron_zpp.data.corpus.encode import Encoded, Encoder
from megatron_zpp.data.corpus.inputs import Block, read_blocks

Item = TypeVar("Item")
Result = TypeVar("Result")

_BLOCK_BYTES = 256 << 10  # large enough to hide the cost of sending it, small enough to balance the load
_AHEAD = 6  # items per worker, in work or finished: one slow item does not stop the other workers


def encode_files(
    files: Sequence[str], build: Callable[[], Encoder], workers: int
) -> Iterator[tuple[Encoded, Block, str, int]]:
    """Yield each block, encoded by one of `workers` processes, its file, and the lines before it in the file.

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
            yield encoded, block, path, lines
            lines += encoded.lines


def ordered_map(
    build: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yield the result of every item, in the order of the items.

    `build` (picklable) is called once in each worker and returns the function. Items are drawn as workers
    take them, so memory holds a few items per worker. Close the generator to end the workers early. Raises
    ChildProcessError if a worker dies, and RuntimeError with a traceback if `build` or the function raises.
    """
    numbered = enumerate(items)
    waiting = deque(islice(numbered, workers))
    pool, idle = list[_Worker](), list[_Worker]()
    working, results = dict[Any, tuple[_Worker, int]](), dict[int, Any]()  # by pipe, by number

    def advance(timeout: float | None) -> None:
        """Take what workers have finished, and give them further items."""
        for pipe in wait(list(working), timeout):
            worker, number = working.pop(pipe)
            results[number] = worker.receive()
            idle.append(worker)
        while idle and (waiting or len(results) + len(working) < workers * _AHEAD):
            following = waiting.popleft() if waiting else next(numbered, None)
            if following is None:
                return
            worker, (number, item) = idle.pop(), following
            worker.send(item)
            working[worker.pipe] = worker, number

    try:
        for _ in waiting:
            pool.append(_Worker(build))
        idle += pool
        for number in count():
            advance(0)
            while number not in results:
                if not working:
                    return
                advance(None)
            yield results.pop(number)
    finally:
        for worker in pool:
            worker.end()


class _Worker:
    """A process that has one item at a time, and a pipe of its own, which ends with it.

    The standard library's executors share a pipe. If a worker is killed while it sends a result, they wait
    for the rest for ever.
    """

    def __init__(self, build: Callable[[], Callable[[Any], Any]]) -> None:
        # spawn, not fork: locks of other threads are not copied, and siblings do not hold pipes open
        context = multiprocessing.get_context("spawn")
        self.pipe, its = context.Pipe()
        self._process = context.Process(target=_serve, args=(build, its), daemon=True)
        resource_tracker.ensure_running()  # which unblocks Ctrl-C when it starts
        # The terminal sends Ctrl-C to all processes, and the parent alone decides.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        its.close()

    def send(self, item: Any) -> None:
        """Give the worker an item, which it takes at once; `receive` says why if it does not."""
        with contextlib.suppress(OSError):
            self.pipe.send(item)

    def receive(self) -> Any:
        """The result of the item. Raises as `ordered_map`."""
        try:
            result, failure = self.pipe.recv()
        except (EOFError, OSError):
            why = "a worker process has died; the machine may have run out of memory"
            raise ChildProcessError(why) from None
        if failure:
            raise RuntimeError(f"in a worker process:\n{failure}")
        return result

    def end(self) -> None:
        """Let the worker end behind its item."""
        self.pipe.close()
        self._process.join()


def _serve(build: Callable[[], Callable[[Any], Any]], pipe: Connection) -> None:
    """Answer items until the parent ends or closes the pipe: (result, "") or (None, the traceback)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # worker processes use all cores already
    with contextlib.suppress(EOFError, OSError):  # of the pipe
        try:
            function = build()
        except Exception:
            pipe.send((None, traceback.format_exc()))
            return
        while True:
            item = pipe.recv()
            try:
                answer = function(item), ""
            except Exception:
                answer = None, traceback.format_exc()
            pipe.send(answer)
