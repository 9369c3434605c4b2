"""Islands: models that train alone for a number of steps, and an outer optimizer over what they moved by.

DiLoCo (2311.08105): every `interval` steps each island sends the outer weights less its own. The mean of what
arrives is the gradient of an outer SGD with Nesterov's momentum, whose new weights every island takes. Inner
optimizers keep their states.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from benchmarks.emulation.flat_model import FlatModel
from benchmarks.emulation.gradients import CrossNodeSum, Rotated, plain_sum
from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.operations import Operations

if TYPE_CHECKING:
    from benchmarks.emulation.emulated_run import EmulatedRanks

BLOCK = 256  # elements of a code's block


@dataclass(frozen=True, kw_only=True)
class IslandSettings:
    """`bits` 4 and 2 are rotated codes with error feedback; `overlap` is the share of an interval after which
    the outer weights of an exchange arrive. Weights have moved on by then, and keep what they moved by.
    """

    count: int = 2
    interval: int = 30
    lr: float = 0.7
    momentum: float = 0.9
    bits: Literal[2, 4, 32] = 32
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 1 or self.interval < 1 or not 0 <= self.overlap <= 1 or self.bits not in (2, 4, 32):
            raise ValueError(f"islands must have count, interval >= 1, overlap 0 to 1, bits 2, 4, 32: {self}")

    @property
    def bytes_per_parameter(self) -> float:
        """Sent per step and island, divided by the other islands."""
        return (self.bits / 8 + (2 / BLOCK if self.bits < 32 else 0)) / self.interval


class Islands:
    """Islands with data and inner optimizers of their own, which take turns on the buffers of one model."""

    def __init__(
        self,
        flat: FlatModel,
        inner: Callable[[FlatModel, int], "EmulatedRanks"],
        settings: IslandSettings,
        operations: Operations,
        *,
        ranks: int,
        steps: int,
        seed: int,
    ) -> None:
        """`inner(flat, ranks)` makes an island of so many ranks. Samples of a step are those of `ranks`
        micro-batches, and the last of the `steps` ends with an exchange.
        """
        self.flat, self._settings, self._steps = flat, settings, steps
        self._ranks = max(1, ranks // settings.count)
        self._islands: list[EmulatedRanks] = []
        for _ in range(settings.count):
            own = copy.copy(flat)
            own.master = flat.master.clone()
            self._islands.append(inner(own, self._ranks))
        self._outer, self._momentum = flat.master.clone(), torch.zeros_like(flat.master)
        self._under_way: tuple[int, list[Tensor]] | None = None  # when it arrives, and the weights it left
        self._exchange: CrossNodeSum = plain_sum
        if settings.bits < 32:
            codes, whole = LloydMaxFormat(settings.bits, BLOCK), slice(0, flat.numel)
            self._exchange = Rotated(operations, codes, flat.runs_of(whole), flat.gaps, seed, feedback=1.0)

    @property
    def skipped(self) -> Tensor:
        """Steps () whose gradient was not finite, of all islands."""
        return torch.stack([island.skipped for island in self._islands]).sum()

    @property
    def raised(self) -> int:
        """No unit of an island sends differences."""
        return 0

    def reference_lag(self, before: Tensor) -> float:
        """Nor does it have a reference."""
        return 0.0

    def accumulate(self, micro_batches: Tensor) -> Tensor:
        """Forward and backward of the ranks' tokens (R, B, T + 1); returns the mean loss ()."""
        parts = micro_batches.reshape(len(self._islands), self._ranks, -1, micro_batches.shape[-1])
        losses = []
        for island, part in zip(self._islands, parts, strict=True):
            self.flat.compute.copy_(island.flat.master)
            losses.append(island.accumulate(list(part)))
        return torch.stack(losses).mean()

    def step(self, learning_rate: float, *, iteration: int, micro_batches: int = 1) -> None:
        """A step of each island, then what arrives, and what leaves, at its end."""
        for island in self._islands:
            island.step(learning_rate, iteration=iteration, micro_batches=micro_batches)
        done, interval = iteration + 1, self._settings.interval
        last = done == self._steps
        if self._under_way is not None and (last or done == self._under_way[0]):
            self._arrive(self._under_way[1])
        if last or done % interval == 0:
            delay = 0 if last else round(self._settings.overlap * interval)
            self._under_way = done + delay, self._leave(iteration // interval)
            if not delay:
                self._arrive(self._under_way[1])

    def _leave(self, exchange: int) -> list[Tensor]:
        """Change the outer weights by what the islands have moved by; returns the islands' weights."""
        settings = self._settings
        left = [island.flat.master.clone() for island in self._islands]
        total = self._exchange([self._outer - weights for weights in left], exchange)
        gradient = total / len(left)
        self._momentum.mul_(settings.momentum).add_(gradient)
        self._outer.sub_(settings.lr * (gradient + settings.momentum * self._momentum))
        return left

    def _arrive(self, left: list[Tensor]) -> None:
        """Move each island from the weights that it sent to the outer weights."""
        for island, weights in zip(self._islands, left, strict=True):
            moved_on = island.flat.master - weights
            torch.add(self._outer, moved_on, out=island.flat.master)
        self._under_way = None

    def evaluate(self, held_out: Tensor, size: int) -> float:
        """The mean loss of (n, T + 1) tokens, `size` at a time, with the mean weights of the islands."""
        torch.mean(torch.stack([island.flat.master for island in self._islands]), 0, out=self.flat.master)
        self.flat.compute.copy_(self.flat.master)
        return self._islands[0].evaluate(held_out, size)
