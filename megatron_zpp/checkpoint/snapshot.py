"""Copies of a rank's states for a save that writes while the training continues."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class Snapshot:
    """CPU memory for a copy of each tensor, pinned where that is of a GPU; taken once, filled at every save.

    `take` begins to copy and `settle` must come before the tensors change: the copies run beside a forward
    and a backward. A writer calls `wait`.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._copies = {name: _buffer_for(tensor) for name, tensor in tensors.items()}
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        self._stream = torch.cuda.Stream(device) if device else None
        self._on_gpu: torch.cuda.Event | None = None  # when the stream has copied
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._on_cpu: Future[None] | None = None  # when the thread has

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Begins to copy all of `tensors`."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._copy(tensors, on_gpu=True)
                self._on_gpu = self._stream.record_event()
        self._on_cpu = self._copier.submit(self._copy, tensors, on_gpu=False)

    def settle(self) -> None:
        """Lets what comes next, on this thread and on its stream, change the tensors."""
        if self._on_cpu is not None:
            self._on_cpu.result()
        if self._on_gpu is not None:
            torch.cuda.current_stream().wait_event(self._on_gpu)

    def wait(self) -> dict[str, Tensor]:
        """The copies, when they are made."""
        assert self._on_cpu is not None, "take comes first"
        self._on_cpu.result()
        if self._on_gpu is not None:
            self._on_gpu.synchronize()
        return self._copies

    def _copy(self, tensors: Mapping[str, Tensor], *, on_gpu: bool) -> None:
        for name, tensor in tensors.items():
            if tensor.is_cuda == on_gpu:
                self._copies[name].copy_(tensor, non_blocking=True)


def _buffer_for(tensor: Tensor) -> Tensor:
    """Pages that are there: the first copy would otherwise wait for the kernel to find them."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
