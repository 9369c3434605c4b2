"""Which unit's parameters are gathered when: ahead of the compute that reads them, in its order."""

from enum import Enum, auto

from megatron_zpp.zero.collectives import Lane
from megatron_zpp.zero.unit import Unit


class Phase(Enum):
    """The direction in which a pass goes through the units."""

    FORWARD = auto()
    BACKWARD = auto()


class Gathers:
    """Fills parameter slots `prefetch` units ahead of the compute.

    A slot that holds a unit's present weights is not filled again: the last layers of a forward are still
    there for the backward, and parameters that never share a slot are gathered once a step.
    """

    def __init__(self, units: list[Unit], lane: Lane, prefetch: int) -> None:
        self._units, self._lane, self._prefetch = units, lane, prefetch
        self._phase = Phase.FORWARD

    def begin(self, phase: Phase) -> None:
        """The pass that starts now goes in this direction."""
        self._phase = phase

    def publish(self) -> None:
        """After the optimizer: publishes every unit, and starts to gather those that the slots can hold.

        They are the ones that the next forward reads first, and the first of them is on its way while the
        others are still being cast.
        """
        taken = set()
        for unit in self._units:
            unit.publish()
            if id(unit.slot) not in taken:
                taken.add(id(unit.slot))
                self._start(unit)

    def before_forward(self, index: int) -> None:
        """Unit `index` is about to compute. In the backward phase that is a recomputation."""
        self._need(index)
        if self._phase is Phase.FORWARD:
            for ahead in range(index + 1, min(index + 1 + self._prefetch, len(self._units))):
                self._start(self._units[ahead])

    def before_backward(self, index: int) -> None:
        """The gradient of unit `index`'s output is there."""
        self._need(index)
        for behind in range(index - 1, max(index - 1 - self._prefetch, -1), -1):
            self._start(self._units[behind])

    def _need(self, index: int) -> None:
        self._start(self._units[index])
        self._units[index].slot.wait()

    def _start(self, unit: Unit) -> None:
        if not unit.slot.holds(unit):
            unit.slot.wait()  # a gather that nobody needed after all must not end later than this one
            unit.slot.assign(unit, self._lane.all_gather(unit.slot.buffer, unit.published))
