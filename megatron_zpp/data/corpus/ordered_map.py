"""Maps a function over items in other processes: order kept, memory bounded, a dead worker is an error.

Each worker is a process of its own with one pipe to the parent. A worker's own thread empties the pipe, so
the parent never waits to send while that worker waits to send; both would wait for ever.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 3  # items a worker holds: one at work, one next, one on the way
_LOOSE = 2  # times the items at work that may wait for their turn, so that one slow item stops nobody


def ordered_map(
    build: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Yields the result of every item, in the items' order.

    `build` is called once in each worker (so it must pickle) and makes the function. Items are drawn only
    as workers take them, so memory holds a few a worker. Close the generator to end the workers early.
    Raises ChildProcessError when a worker dies, and RuntimeError with its traceback when `build` or the
    function raises.
    """
    with _started(build, workers) as team:
        remaining = iter(items)
        numbers = itertools.count()
        finished: dict[int, Result] = {}
        next_out = next_in = 0
        while True:
            while next_in - next_out < workers * _AHEAD * _LOOSE:
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
    """What a worker sends in place of a result when its function raised."""

    traceback: str


class _Worker:
    """The parent's side of one worker: a process, the pipe to it, the numbers of the items it holds."""

    def __init__(self, context: Any, build: Callable[[], Callable]) -> None:
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, build), daemon=True)
        self.numbers: deque[int] = deque()
        self.process.start()
        theirs.close()  # the worker then holds the only copy, and its death closes the pipe

    def send(self, number: int, item: Any) -> None:
        try:
            self.connection.send(item)
        except OSError:
            raise self._death() from None
        self.numbers.append(number)

    def receive(self) -> tuple[int, Any]:
        try:
            result = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(result, _Failure):
            raise RuntimeError(f"in a worker process:\n{result.traceback}")
        return self.numbers.popleft(), result

    def _death(self) -> ChildProcessError:
        self.process.join(timeout=10)
        code = self.process.exitcode
        how = (
            f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with status {code}"
        )
        hint = "; the machine may be short of memory" if code == -signal.SIGKILL else ""
        return ChildProcessError(f"worker process {self.process.pid} {how}{hint}")


@contextlib.contextmanager
def _started(build: Callable[[], Callable], count: int) -> Iterator[list[_Worker]]:
    # spawn, not fork: no thread or lock is copied half-way, and no sibling holds a pipe open
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
    """Processes started here never see Ctrl-C, which the terminal sends to all: stopping is the parent's."""
    resource_tracker.ensure_running()  # otherwise the first start does, and unblocks SIGINT as it ends
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, build: Callable[[], Callable]) -> None:
    """A worker's life: ends when the parent closes the pipe, or dies and so closes it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are shared out by processes already
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
