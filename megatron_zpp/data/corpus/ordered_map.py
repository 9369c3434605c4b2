"""Maps a function over items in other processes, in order and with bounded memory."""

import contextlib
import itertools
import multiprocessing
import os
import queue
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 6  # items per worker, in work or finished: one slow item does not stop the other workers


def ordered_map(
    build: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yield the result of every item, in the order of the items.

    `build` (picklable) is called once in each worker and returns the function. Items are drawn as workers
    take them, so memory holds a few items per worker. Close the generator to end the workers early. Raises
    ChildProcessError if a worker dies, and RuntimeError with a traceback if `build` or the function raises.
    """
    # spawn, not fork: locks of other threads are not copied, and siblings do not hold pipes open
    context = multiprocessing.get_context("spawn")
    team: list[BaseProcess] = []
    idle: queue.SimpleQueue[tuple[BaseProcess, Connection]] = queue.SimpleQueue()

    def run(item: Item) -> Result:
        """Have an idle worker do an item; one side of its pipe only sends while the other one receives."""
        process, connection = idle.get()
        try:
            with contextlib.suppress(OSError):  # what a worker sends last is why it has ended
                connection.send(item)
            failure, result = connection.recv()
        except (EOFError, OSError):
            process.join(timeout=10)
            raise _death(process) from None
        finally:
            idle.put((process, connection))  # also a dead worker, so that no thread waits for it
        if failure:
            raise RuntimeError(f"in a worker process:\n{failure}")
        return result

    with ThreadPoolExecutor(workers) as threads:
        try:
            with _interrupts_held():
                for _ in range(workers):
                    connection, theirs = context.Pipe()
                    team.append(context.Process(target=_serve, args=(theirs, build), daemon=True))
                    team[-1].start()
                    theirs.close()  # the worker holds the only copy, so its death closes the pipe
                    idle.put((team[-1], connection))
            remaining, pending = iter(items), deque[Future[Result]]()
            while True:
                room = workers * _AHEAD - len(pending)
                pending += (threads.submit(run, item) for item in itertools.islice(remaining, room))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            for process in team:
                process.kill()
                process.join()
            threads.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block Ctrl-C in processes started in this context: the terminal signals all, but the parent decides."""
    resource_tracker.ensure_running()  # otherwise the first start does this, and unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _death(process: BaseProcess) -> ChildProcessError:
    code = process.exitcode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with status {code}"
    hint = "; the machine may have run out of memory" if code == -signal.SIGKILL else ""
    return ChildProcessError(f"worker process {process.pid} {how}{hint}")


def _serve(connection: Connection, build: Callable[[], Callable[[Any], Any]]) -> None:
    """Run a worker until the parent closes the pipe or dies."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # worker processes use all cores already
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            function = build()
            while True:
                connection.send((None, function(connection.recv())))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception:
            connection.send((traceback.format_exc(), None))
