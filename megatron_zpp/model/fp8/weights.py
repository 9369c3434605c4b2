"""Weights of linear maps that are held, gathered and multiplied as E4M3 codes, one byte per parameter.

As with Megatron-LM's --fp8-param-gather. The optimizer's fp32 master weights are encoded once per step, with
the scale that delayed scaling has for the step to come; model/fp8/cast.py has the rounding. So what is
multiplied are codes of the master weights themselves. Without this, they are codes of the master weights
after these were rounded to bf16.

Ranks encode parts of weights. The scale follows from the largest magnitude of the whole weight one step
before, over all ranks; larger numbers saturate. Before a run's first step, and after loading weights without
scales, it is that of the weight itself, over all ranks.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megatron_zpp.model.fp8.cast import FORMATS, WEIGHT, factors_of, largest_finite, plain_cast, scale_of
from megatron_zpp.model.fp8.scaling import DelayedScaling


def plain_encode(numbers: Tensor, codes: Tensor, factors: Tensor, maxima: Tensor) -> None:
    """Write the codes of weights (n,) fp32 to `codes` (n,) E4M3; `maxima` grow. See model/fp8/cast.py."""
    rows, _ = plain_cast(numbers[None], factors, maxima, WEIGHT, rows=True, columns=False)
    codes.copy_(rows[0])


class WeightCodes:
    """The weights of all linear maps of a `DelayedScaling`, as codes: a WeightEncoder of zero/."""

    def __init__(self, scaling: DelayedScaling, encode: Callable[..., None] = plain_encode) -> None:
        self._scaling, self._encode = scaling, encode
        self._held = {f"{name}.weight": held for name, held in scaling.hold_codes().items()}
        self.names = tuple(self._held)

    def attach(self, name: str, codes: Tensor) -> None:
        """See WeightEncoder; `codes` (N, K) are in memory of the caller."""
        self._held[name].product.codes = codes.view(FORMATS[WEIGHT])

    def begin(self) -> None:
        """See WeightEncoder."""
        torch._foreach_zero_([held.maxima for held in self._held.values()])

    def start(self, parts: Iterable[tuple[str, Tensor]], over_ranks: Callable[[Tensor], Tensor]) -> None:
        """See WeightEncoder; `over_ranks` takes and returns the largest finite magnitudes, (L,)."""
        self.begin()
        if self._scaling.known:
            return
        for name, numbers in parts:
            maxima = self._held[name].maxima
            maxima[WEIGHT] = torch.maximum(maxima[WEIGHT], largest_finite(numbers))
        found = over_ranks(torch.stack([held.maxima[WEIGHT] for held in self._held.values()]))
        factors = factors_of(scale_of(found, WEIGHT)[:, None].expand(-1, 3))
        torch._foreach_copy_([held.factors for held in self._held.values()], list(factors.unbind()))
        self.begin()

    def encode(self, name: str, numbers: Tensor, codes: Tensor) -> None:
        """See WeightEncoder."""
        held = self._held[name]
        self._encode(numbers, codes.view(FORMATS[WEIGHT]), held.factors, held.maxima)
