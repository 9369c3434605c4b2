"""How long named parts of a step take, without waiting for the device."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

FORWARD, BACKWARD = "forward", "backward"
WAIT_GATHERS, WAIT_REDUCTIONS, GRADIENT_NORM = "wait-for-gathers", "wait-for-reductions", "gradient-norm"
WAITS = (WAIT_GATHERS, WAIT_REDUCTIONS, GRADIENT_NORM)  # in which a rank that is ahead waits for others


class Sections(Protocol):
    """Receives the begin and end of the parts of a step."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """A context manager around the part `name`."""

    def paused(self) -> AbstractContextManager[None]:
        """A context manager around work that is no part of a step and is not timed."""


class NoSections:
    """Measures nothing."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """See Sections."""
        return _NOTHING

    def paused(self) -> AbstractContextManager[None]:
        """See Sections."""
        return _NOTHING


_NOTHING = nullcontext()
UNTIMED = NoSections()


class TimedSections:
    """Adds up the times of parts between two reports: of the CUDA stream, or on a CPU of this thread."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._running = device.type == "cuda", True
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """See Sections. Parts may lie inside one another."""
        if not self._running:
            yield
            return
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
        """See Sections."""
        self._running = False
        yield
        self._running = True

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. Waits for the device."""
        if self._events:
            self._events[-1][2].synchronize()
        for name, start, end in self._events:
            self._seconds[name] += start.elapsed_time(end) / 1000
        taken = dict(self._seconds)
        self._seconds, self._events = dict.fromkeys(taken, 0.0), []
        return taken
