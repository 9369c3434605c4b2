"""What Muon does with each element of a unit, before and after Newton-Schulz."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
    momentum: float
    nesterov: bool


class StepNumbers(NamedTuple):
    """What is equal for all units of a step."""

    divisor: Tensor  # (); gradients are divided by it
    found_inf: Tensor  # (); nothing changes unless it is 0
    shrink: float  # times the weights
    step: float  # times updates, to be added to the weights


class MuonPasses(Protocol):
    """The two passes over a unit's elements."""

    def average(self, gradients: Sequence[GradSegment], momentum: Tensor, numbers: StepNumbers) -> None:
        """Let the momentum take in the gradient, and write what is made orthogonal to the room."""

    def apply(self, master: Tensor, source: Tensor | None, numbers: StepNumbers) -> None:
        """Change the master weights by what has become of it, and write them to `source` too."""


def muon_passes(given: MuonElements) -> MuonPasses:
    """Those of the device of the room."""
    if given.room.is_cuda:
        from megatron_zpp.zero.fused.muon import FusedPasses

        return FusedPasses(given)
    return PlainPasses(given)


class PlainPasses:
    """In plain torch, which waits for the device."""

    def __init__(self, given: MuonElements) -> None:
        self._given = given

    def average(self, gradients: Sequence[GradSegment], momentum: Tensor, numbers: StepNumbers) -> None:
        """See MuonPasses."""
        if numbers.found_inf.item():
            return
        places, _, room, owned, states, decay, nesterov = self._given
        for place in places:
            shard = within(place.elements, owned)
            for segment in segments_inside(gradients, range(shard.start, shard.stop)):
                gradient = segment.flat.float() / numbers.divisor
                average = segment.of(momentum[within(place.elements, states)]).lerp_(gradient, 1 - decay)
                if place.there is not None:
                    used = gradient.lerp(average, decay) if nesterov else average
                    segment.of(room[place.there :]).copy_(used)

    def apply(self, master: Tensor, source: Tensor | None, numbers: StepNumbers) -> None:
        """See MuonPasses."""
        if numbers.found_inf.item():
            return
        for place, scale in zip(self._given.places, self._given.scales, strict=True):
            part = within(place.elements, self._given.owned)
            update = self._given.room[place.back : place.back + len(place.elements)]
            master[part].mul_(numbers.shrink).add_(update.float(), alpha=numbers.step * scale)
            if source is not None:
                source[part].copy_(master[part])
