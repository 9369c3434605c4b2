"""What Muon does with each element of a unit, before and after Newton-Schulz."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.exchange.segments import GradSegment, segments_inside
from megatron_zpp.placement import within
from megatron_zpp.zero.whole_matrices import Place


class MuonElements(NamedTuple):
    """The elements of a unit on this rank, and what is equal in all steps."""

    places: Sequence[Place]
    scales: Sequence[float]  # of the updates of each place
    room: Tensor  # of the places
    owned: range  # elements of the unit that have a master weight
    states: range  # those that have momentum
    unit: int  # which trained unit of the model it is
    momentum: float
    nesterov: bool


class StepNumbers(NamedTuple):
    """What is equal for all units of a step."""

    divisor: Tensor  # (); gradients are divided by it
    found_inf: Tensor  # (); nothing changes unless it is 0
    shrink: float  # times the weights
    step: float  # times updates, to be added to the weights
    steps: Tensor  # (); the number of the step, for random bits


class MuonPasses:
    """The two passes over a unit's elements: in plain torch, which waits for the device."""

    def __init__(self, given: MuonElements) -> None:
        self._given = given

    def average(self, gradients: Sequence[GradSegment], momentum: Tensor, numbers: StepNumbers) -> None:
        """Let the momentum take in the gradient, and write what is made orthogonal to the room.

        Momentum is fp32, or bf16 that is rounded stochastically as ops/state_codes.py says.
        """
        if numbers.found_inf.item():
            return
        places, _, room, owned, states, unit, decay, nesterov = self._given
        for place in places:
            shard = within(place.elements, owned)
            for segment in segments_inside(gradients, range(shard.start, shard.stop)):
                gradient = segment.flat.float() / numbers.divisor
                kept = segment.of(momentum[within(place.elements, states)])
                average = kept.float().lerp_(gradient, 1 - decay)
                if kept.dtype == torch.bfloat16:
                    kept.copy_(_rounded(average, place.elements.start + segment.start, unit, numbers.steps))
                if place.there is not None:
                    used = gradient.lerp(average, decay) if nesterov else average
                    segment.of(room[place.there :]).copy_(used)

    def apply(self, master: Tensor, source: Tensor | None, numbers: StepNumbers) -> None:
        """Change the master weights by what has become of it, and write them to `source` too."""
        if numbers.found_inf.item():
            return
        for place, scale in zip(self._given.places, self._given.scales, strict=True):
            part = within(place.elements, self._given.owned)
            update = self._given.room[place.back : place.back + len(place.elements)]
            master[part].mul_(numbers.shrink).add_(update.float(), alpha=numbers.step * scale)
            if source is not None:
                source[part].copy_(master[part])


def _rounded(average: Tensor, first: int, unit: int, steps: Tensor) -> Tensor:
    """Momentum (n,) fp32 in bf16, from element `first` of a unit on."""
    from megatron_zpp.ops.state_codes import Rounding, draws_of, encode

    begin, end = first // 4 * 4, first + len(average)  # four numbers have one counter
    draws = draws_of(Rounding(steps, unit), slice(begin, -(-end // 4) * 4)).first
    return encode(average, "bf16", second=False, draws=draws[first - begin : end - begin])[0]
