"""Which unit's parameters are gathered when: ahead of the compute that reads them, in its order."""

from collections.abc import Iterable, Sequence
from enum import Enum, auto

from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.zero.collectives.interface import Gather
from megatron_zpp.zero.sections import UNTIMED, WAIT_GATHERS, Sections
from megatron_zpp.zero.unit import Unit


class Phase(Enum):
    """The direction in which a pass goes through the units."""

    FORWARD = auto()
    BACKWARD = auto()


def backward_order(units: int, recomputed: Iterable[range]) -> list[int]:
    """The units in the order in which a backward reads their parameters: from the last to the first.

    Before the backward of a range of `recomputed` units comes their forward. Its last unit is read once for
    both.
    """
    order: list[int] = []
    first_of = {chunk[-1]: chunk[0] for chunk in recomputed}
    for index in reversed(range(units)):
        order += range(first_of.get(index, index), index + 1)
    return order


class Gathers:
    """Fills parameter slots `prefetch` units ahead of the compute, in the order in which it reads them.

    A slot that holds a unit's present weights is not filled again: the last layers of a forward are still
    there for the backward, and parameters that never share a slot are gathered once a step. No slot is filled
    for a later unit while the compute has yet to read what it holds for an earlier one. So where
    `prefetch` + 1, the number of slots, divides the number of units that are recomputed together, the first
    gather of each such range but the last starts only when the compute needs it.
    """

    def __init__(
        self,
        units: list[Unit],
        gather: Gather,
        secondary: Gather | None,
        prefetch: int,
        sections: Sections = UNTIMED,
        recomputed: Sequence[range] = (),
    ) -> None:
        """`secondary` gathers from the secondary shards of this rank's hpZ group.

        `recomputed`: ranges of units whose forward the backward repeats, each before the gradients of its
        last unit.
        """
        self._units, self._gather, self._secondary, self._prefetch = units, gather, secondary, prefetch
        self._sections, self._phase = sections, Phase.FORWARD
        self._forward, self._backward = list(range(len(units))), backward_order(len(units), recomputed)
        # Where in `_backward` a unit is recomputed, and where its gradients are made.
        self._recomputed_at, self._gradients_at = {}, {}
        for at, index in enumerate(self._backward):
            self._recomputed_at.setdefault(index, at)
            self._gradients_at[index] = at
        self._first_of = {chunk[-1]: chunk[0] for chunk in recomputed}
        self._to_recompute: int | None = None  # the last unit of the range that is being recomputed

    def begin(self, phase: Phase) -> None:
        """The pass that starts now goes in this direction."""
        self._phase, self._to_recompute = phase, None

    def write_gather_source(self, stepped: Iterable[Unit]) -> None:
        """Takes the units as the optimizer is done with them, and starts to gather those that slots can hold.

        They are the ones that the next forward reads first.
        """
        taken = set()
        for unit in stepped:
            unit.changed()
            if id(unit.slot) not in taken:
                taken.add(id(unit.slot))
                self._start(unit)

    def before_forward(self, index: int) -> None:
        """Unit `index` is about to compute. In the backward phase that is a recomputation."""
        self._need(index)
        if self._phase is Phase.FORWARD:
            self._start_ahead(self._forward, index)
            return
        if index == self._to_recompute:
            self._to_recompute = None
        self._start_ahead(self._backward, self._recomputed_at[index])

    def before_backward(self, index: int) -> None:
        """The gradient of unit `index`'s output is there. What it is the last of may be recomputed first."""
        assert self._to_recompute is None, f"unit {self._to_recompute} was to be recomputed and was not"
        if index in self._first_of:
            self._to_recompute, first = index, self._first_of[index]
            self._need(first)
            self._start_ahead(self._backward, self._recomputed_at[first])
            return
        self._need(index)
        self._start_ahead(self._backward, self._gradients_at[index])

    def _start_ahead(self, order: list[int], at: int) -> None:
        """Starts the gathers of the units that are read next, up to one whose slot is still to be read."""
        taken = {order[at]: self._units[order[at]].slot}
        for index in order[at + 1 :]:
            if index in taken:
                continue
            slot = self._units[index].slot
            if len(taken) > self._prefetch or any(slot is other for other in taken.values()):
                return
            taken[index] = slot
            self._start(self._units[index])

    def _need(self, index: int) -> None:
        self._start(self._units[index])
        with self._sections(WAIT_GATHERS):
            self._units[index].slot.wait()

    def _start(self, unit: Unit) -> None:
        if not unit.slot.holds(unit):
            unit.slot.wait()  # a gather that nobody needed after all must not end later than this one
            unit.slot.assign(unit, self._fill(unit))

    def _fill(self, unit: Unit) -> Pending:
        """The first gather of new weights refreshes the secondary shard, and the others come from those."""
        if unit.secondary is not None and unit.secondary_version == unit.version:
            return self._secondary.gather(unit.slot.buffer, unit.secondary)
        unit.secondary_version = unit.version
        return self._gather.gather(unit.slot.buffer, unit.gather_source, unit.secondary)
