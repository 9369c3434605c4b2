"""What a step does once buffers are taken: nothing that waits for the device, nothing that allocates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


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
    """After so many steps five more neither wait nor ask CUDA for memory."""
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    mallocs = torch.cuda.memory_stats()["num_device_alloc"]
    with waits_are_errors():
        for _ in range(5):
            step()
    assert torch.cuda.memory_stats()["num_device_alloc"] == mallocs
