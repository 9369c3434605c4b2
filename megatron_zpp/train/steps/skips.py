"""Reports to the host whether a step was skipped, in time for the learning rate of the next step."""

import torch
from torch import Tensor


class SkipFlag:
    """The flag of the newest step, copied from the device after that step.

    The learning rate of a step depends on whether the step before it was skipped. The host reads the flag
    when it has submitted the forward and the backward of the next step. The device then still has that work
    to do, so it never runs dry. The wait keeps the host at most one step ahead of the device, as the vote on
    stopping does anyway (vote.py). Where units step in the backward, the rate is needed before the forward,
    which then starts late by the time that its first kernels take to be submitted.

    The rate is computed on the host, because AdamW's kernels take it as an argument, and because cosines
    and roots on a device and on a CPU differ in their last bits.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._flag = torch.zeros((), pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._pending = False

    def send(self, skipped: Tensor) -> None:
        """Begin to copy the flag of a step, a scalar on the device: 1 if the step was skipped, else 0."""
        assert not self._pending, "the flag of the step before has not been read"
        self._flag.copy_(skipped, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._pending = True

    def read(self) -> bool:
        """Whether the newest step was skipped; False if that was read before. Waits for the copy."""
        if not self._pending:
            return False
        self._pending = False
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._flag)
