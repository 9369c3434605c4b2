"""Steps of an engine: their losses, what their kernels take, and what a steady one must not do."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.step_parts import parts_of_trace
from megatron_zpp.zero.engine import ZeroEngine


def losses_of(engine: ZeroEngine, steps: Iterable[Sequence[Tensor]]) -> list[float]:
    """The mean loss of the micro-batches of each step; none is skipped."""
    losses = []
    for step in steps:
        parts = [engine.accumulate(part, index=at, micro_batches=len(step)) for at, part in enumerate(step)]
        losses.append(torch.stack(parts).mean().item())
        assert engine.step(1e-3).skipped.item() == 0
    return losses


def step_of(engine: ZeroEngine, tokens: Tensor, micro_batches: int = 1, rate: float = 1e-3) -> None:
    """Take a step of equal micro-batches; in the backward if the engine steps there."""
    if engine._in_backward is not None:
        engine.begin_step(rate)
    for index in range(micro_batches):
        engine.accumulate(tokens, index=index, micro_batches=micro_batches)
    engine.step(rate)


def parts_of_steps(run: Callable[[], None], count: int, file: Path) -> dict[str, float]:
    """Milliseconds of each kind of kernels, per step of a `run` of so many, whose trace is written."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    trace.export_chrome_trace(str(file))
    return parts_of_trace(file, count)


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Whatever makes the host wait for the device raises in here."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_steady(step: Callable[[], None], warmup: int) -> None:
    """After so many steps no step waits, and five or the next five ask CUDA for no memory.

    There are two tries because what earlier tests left to the caching allocator decides when it has enough.
    """
    for _ in range(warmup):
        step()
    asked = []
    for _ in range(2):
        before = torch.cuda.memory_stats()["num_device_alloc"]
        with waits_are_errors():
            for _ in range(5):
                step()
        asked.append(torch.cuda.memory_stats()["num_device_alloc"] - before)
        if asked[-1] == 0:
            return
    raise AssertionError(f"each five steps asked CUDA for memory: {asked} times")
