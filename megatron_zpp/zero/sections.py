"""How long named parts of a step take, without waiting for the device."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

FORWARD, BACKWARD = "forward", "backward"
WAIT_GATHERS, WAIT_REDUCTIONS, GRADIENT_NORM = "wait-for-gathers", "wait-for-reductions", "gradient-norm"
WAITS = (WAIT_GATHERS, WAIT_REDUCTIONS, GRADIENT_NORM)  # in which a rank that is ahead waits for others
_NOTHING = nullcontext()


class Sections:
    """Adds up the times of parts between two reports: of the CUDA stream, or on a CPU of this thread.

    Without a device nothing is timed.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.timed, self._on_gpu = device is not None, device is not None and device.type == "cuda"
        self._running = self.timed
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """A context manager around the part `name` of a step. Parts may lie inside one another."""
        return self._part(name) if self._running else _NOTHING

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        self._seconds.setdefault(name, 0.0)
        if not self._on_gpu:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((name, start, end))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context manager around work that is no part of a step and is not timed."""
        self._running = False
        yield
        self._running = self.timed

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. Waits for the device."""
        if self._events:
            self._events[-1][2].synchronize()
        for name, start, end in self._events:
            self._seconds[name] += start.elapsed_time(end) / 1000
        taken = dict(self._seconds)
        self._seconds, self._events = dict.fromkeys(taken, 0.0), []
        return taken


UNTIMED = Sections()
