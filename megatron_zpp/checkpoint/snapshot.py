"""Copies of a rank's states for a save that writes while the training continues."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class Snapshot:
    """CPU memory for a copy of each tensor, pinned for a GPU's; allocated once, filled at every save.

    `take` starts the copies, which run beside a forward and a backward. `settle` must be called before the
    tensors change. The writer calls `wait`.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._copies = {  # with all pages mapped, so that the first copy does not wait for page faults
            name: torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            for name, tensor in tensors.items()
        }
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        self._stream = torch.cuda.Stream(device) if device else None
        self._on_gpu: torch.cuda.Event | None = None  # after the stream's copies
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._on_cpu: Future[None] | None = None  # the thread's copies

    def take(self, find: Callable[[], Mapping[str, Tensor]]) -> None:
        """Start to copy all tensors that `find` returns.

        On a GPU `find` is called on the stream of the copies: what it waits for delays them, and not the
        compute.
        """
        if self._stream is None:
            tensors = find()
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                tensors = find()
                self._copy(tensors, on_gpu=True)
                self._on_gpu = self._stream.record_event()
        self._on_cpu = self._copier.submit(self._copy, tensors, on_gpu=False)

    def settle(self) -> None:
        """Wait, on this thread and its stream, until the tensors may change."""
        if self._on_cpu is not None:
            self._on_cpu.result()
        if self._on_gpu is not None:
            torch.cuda.current_stream().wait_event(self._on_gpu)

    def wait(self) -> dict[str, Tensor]:
        """Wait for the copies and return them."""
        assert self._on_cpu is not None, "take comes first"
        self._on_cpu.result()
        if self._on_gpu is not None:
            self._on_gpu.synchronize()
        return self._copies

    def _copy(self, tensors: Mapping[str, Tensor], *, on_gpu: bool) -> None:
        for name, tensor in tensors.items():
            if tensor.is_cuda == on_gpu:
                self._copies[name].copy_(tensor, non_blocking=True)


def writing_thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    """A thread that waits for copies of `device` and writes them.

    A thread begins with device 0, on which a process would take memory that has another device.
    """
    initializer = torch.cuda.set_device if device.type == "cuda" else lambda _: None
    return ThreadPoolExecutor(1, name, initializer=initializer, initargs=(device,))
