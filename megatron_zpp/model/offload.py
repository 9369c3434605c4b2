"""Keeps the activations that recomputation starts from in CPU memory (ZeRO paper, section 6.1, P_a+cpu)."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import copy_beside


@dataclass(eq=False)
class Offloaded:
    """One tensor on its way out, in CPU memory, or on its way back."""

    device: torch.device
    on_device: Tensor | None  # until its copy is done, and when it is back
    home: Tensor  # pinned, like the other
    moved: torch.cuda.Event  # after the newest copy of it


class ActivationOffload:
    """Copies run on a stream of their own: out beside the forward, and back one tensor ahead of the backward.

    Tensors come back in the reverse of the order in which they left, so that all but the newest are in CPU
    memory alone. Pinned buffers are kept and used again in every step.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._away: list[Offloaded] = []  # in the order in which they left
        self._homes: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def saving(self) -> AbstractContextManager[None]:
        """Offload the GPU tensors that autograd saves inside this context."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Offloaded | Tensor:
        if not tensor.is_cuda:
            return tensor  # torch's checkpoint also saves an empty CPU tensor of its own
        if self._away:
            self._leave(self._away[-1])
        homes = self._homes.setdefault((tensor.shape, tensor.dtype), [])
        home = homes.pop() if homes else torch.empty_like(tensor, device="cpu", pin_memory=True)
        entry = Offloaded(tensor.device, tensor, home, self._copy(tensor, home, tensor.device))
        self._away.append(entry)
        return entry

    def _leave(self, entry: Offloaded) -> None:
        """Frees the device's copy. The compute waits, as its memory is then the next activation's."""
        if entry.on_device is not None:
            torch.cuda.current_stream().wait_event(entry.moved)
            entry.on_device = None

    def _unpack(self, entry: Offloaded | Tensor) -> Tensor:
        if isinstance(entry, Tensor):
            return entry
        back = self._return(entry)
        torch.cuda.current_stream().wait_event(entry.moved)
        if entry in self._away:
            del self._away[self._away.index(entry) :]
            # Free for the next tensor at once: what that copies runs behind this copy on the same stream.
            self._homes[entry.home.shape, entry.home.dtype].append(entry.home)
            if self._away:
                self._return(self._away[-1])
        return back

    def _return(self, entry: Offloaded) -> Tensor:
        """The tensor on the device; starts the copy back, unless it never left or is on its way."""
        if entry.on_device is None:
            entry.on_device = torch.empty_like(entry.home, device=entry.device)
            entry.moved = self._copy(entry.home, entry.on_device, entry.device)
        return entry.on_device

    def _copy(self, source: Tensor, target: Tensor, device: torch.device) -> torch.cuda.Event:
        """Starts a copy beside the compute; the event follows it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return copy_beside(self._stream, target, source)
