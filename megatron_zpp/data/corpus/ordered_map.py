"""Maps a function over items in other processes, in order and with bounded memory; a dead worker is an error.

Each worker is a process with one pipe to the parent. A thread of the worker empties the pipe, so that parent
and worker never both wait to send, which would be a deadlock.
"""

import contextlib
import itertools
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 3  # items per worker: one in work, one received, one in the pipe
_BUFFERED = 2  # finished items per item in work, at most: one slow item does not stop the other workers


def ordered_map(
    build: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yield the result of every item, in the order of the items.

    `build` (picklable) is called once in each worker and returns the function. Items are drawn as workers
    take them, so memory holds a few items per worker. Close the generator to end the workers early. Raises
    ChildProcessError if a worker dies, and RuntimeError with a traceback if `build` or the function raises.
    """
    with _started(build, workers) as team:
        remaining = iter(items)
        numbers = itertools.count()
        finished: dict[int, Result] = {}
        next_out = next_in = 0
        while True:
            while next_in - next_out < workers * _AHEAD * _BUFFERED:
                worker = min(team, key=lambda worker: len(worker.numbers))
                if len(worker.numbers) == _AHEAD:
                    break
                try:
                    item = next(remaining)
                except StopIteration:
                    break
                worker.send(next(numbers), item)
                next_in += 1
            busy = {worker.connection: worker for worker in team if worker.numbers}
            if not busy:
                return
            for connection in wait(list(busy)):
                number, result = busy[connection].receive()
                finished[number] = result
            while next_out in finished:
                yield finished.pop(next_out)
                next_out += 1


@dataclass(frozen=True)
class _Failure:
    """Sent by a worker in place of a result if its function raised."""

    traceback: str

    def error(self) -> RuntimeError:
        """Return the exception that the parent raises."""
        return RuntimeError(f"in a worker process:\n{self.traceback}")


class _Worker:
    """One worker, as seen by the parent: its process, the pipe to it, the numbers of its items."""

    def __init__(self, context: Any, build: Callable[[], Callable]) -> None:
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, build), daemon=True)
        self.numbers: deque[int] = deque()
        self.process.start()
        theirs.close()  # the worker holds the only copy, so its death closes the pipe

    def send(self, number: int, item: Any) -> None:
        try:
            self.connection.send(item)
        except OSError:
            raise self._reason() from None
        self.numbers.append(number)

    def receive(self) -> tuple[int, Any]:
        try:
            result = self.connection.recv()
        except (EOFError, OSError):
            raise self._reason() from None
        if isinstance(result, _Failure):
            raise result.error()
        return self.numbers.popleft(), result

    def _reason(self) -> RuntimeError | ChildProcessError:
        """Return why the worker has ended: the failure that it sent last, or else how its process died."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                if isinstance(result := self.connection.recv(), _Failure):
                    return result.error()
        self.process.join(timeout=10)
        code = self.process.exitcode
        how = (
            f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with status {code}"
        )
        hint = "; the machine may have run out of memory" if code == -signal.SIGKILL else ""
        return ChildProcessError(f"worker process {self.process.pid} {how}{hint}")


@contextlib.contextmanager
def _started(build: Callable[[], Callable], count: int) -> Iterator[list[_Worker]]:
    # spawn, not fork: locks of other threads are not copied, and siblings do not hold pipes open
    context = multiprocessing.get_context("spawn")
    team: list[_Worker] = []
    try:
        with _interrupts_held():
            for _ in range(count):
                team.append(_Worker(context, build))
        yield team
        for worker in team:
            worker.connection.close()
            worker.process.join()
    except BaseException:
        for worker in team:
            worker.process.kill()
            worker.process.join()
        raise


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block Ctrl-C in processes started in this context: the terminal signals all, but the parent decides."""
    resource_tracker.ensure_running()  # otherwise the first start does this, and unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, build: Callable[[], Callable]) -> None:
    """Run a worker until the parent closes the pipe or dies."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # worker processes use all cores already
    inbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    threading.Thread(target=_empty_pipe, args=(connection, inbox), daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            function = build()
            while message := inbox.get():
                connection.send(function(message[0]))
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception:
            connection.send(_Failure(traceback.format_exc()))


def _empty_pipe(connection: Connection, inbox: "queue.SimpleQueue[list[Any]]") -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put([connection.recv()])
    inbox.put([])
