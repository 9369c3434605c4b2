"""Which unit's parameters are gathered when: ahead of the compute that reads them, in its order."""

from collections.abc import Iterable
from enum import Enum, auto

from megatron_zpp.zero.collectives import Gather
from megatron_zpp.zero.lane import Pending
from megatron_zpp.zero.sections import UNTIMED, WAIT_GATHERS, Sections
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

    def __init__(
        self,
        units: list[Unit],
        gather: Gather,
        secondary: Gather | None,
        prefetch: int,
        sections: Sections = UNTIMED,
    ) -> None:
        """`secondary` gathers from the secondary shards of this rank's hpZ group."""
        self._units, self._gather, self._secondary, self._prefetch = units, gather, secondary, prefetch
        self._sections, self._phase = sections, Phase.FORWARD

    def begin(self, phase: Phase) -> None:
        """The pass that starts now goes in this direction."""
        self._phase = phase

    def publish(self, stepped: Iterable[Unit]) -> None:
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
            for ahead in range(index + 1, min(index + 1 + self._prefetch, len(self._units))):
                self._start(self._units[ahead])

    def before_backward(self, index: int) -> None:
        """The gradient of unit `index`'s output is there."""
        self._need(index)
        for behind in range(index - 1, max(index - 1 - self._prefetch, -1), -1):
            self._start(self._units[behind])

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
        return self._gather.gather(unit.slot.buffer, unit.published, unit.secondary)
