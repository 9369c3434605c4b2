"""Sums flags over all ranks with a delay of one turn, so that no rank waits for another or for its device."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.distributed.topology import Topology


class Vote:
    """All ranks take the same turns and read the same sums, so that they decide equally.

    On a GPU, sums are computed and read on a separate stream, after the compute of the previous turn.
    """

    def __init__(self, flags: int, topology: Topology, device: torch.device) -> None:
        """Prepare a vote on `flags` flags of the host and one flag of the device."""
        on_gpu = device.type == "cuda"
        self._world_size = topology.world_size
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._own = torch.zeros(flags, pin_memory=on_gpu)
        self._sums = torch.zeros(flags + 1, device=device)
        self._read = torch.zeros(flags + 1, pin_memory=on_gpu)
        self._device_flag: Tensor | None = None  # the stream uses it until the sums are read
        self._work: dist.Work | None = None
        self._pending = False

    def turn(self, flags: Sequence[bool], device_flag: Tensor | None = None) -> list[float] | None:
        """Submit this rank's flags, and return the sums of the previous turn; None at the first turn.

        `device_flag` is a scalar on the device, 0 or 1.
        """
        sums = self.outcome()
        self._own.copy_(torch.tensor(flags))
        self._device_flag = device_flag
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with self._on_stream():
            self._sums[:-1].copy_(self._own, non_blocking=True)
            self._sums[-1].zero_() if device_flag is None else self._sums[-1].copy_(device_flag)
            if self._world_size > 1:
                self._work = dist.all_reduce(self._sums, async_op=True)
        self._pending = True
        return sums

    def outcome(self) -> list[float] | None:
        """Wait for the sums of the newest turn; None if they were read before, or there was no turn."""
        if not self._pending:
            return None
        self._pending = False
        with self._on_stream():
            if self._work is not None:
                self._work.wait()
            self._read.copy_(self._sums, non_blocking=True)
            if self._stream is not None:
                self._stream.record_event().synchronize()
        return self._read.tolist()

    def _on_stream(self) -> torch.cuda.StreamContext | nullcontext[None]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
