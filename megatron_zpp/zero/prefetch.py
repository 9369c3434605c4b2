"""Decides which unit's parameters are gathered when: ahead of the compute that reads them, in its order.

Units and slots are numbers here, without tensors, so that --dry-run walks through a step with the same code.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.zero.communication_plan import CommunicationPlan
from megatron_zpp.zero.sections import UNTIMED, WAIT_GATHERS, Sections


class Phase(Enum):
    """The direction in which a pass goes through the units."""

    FORWARD = auto()
    BACKWARD = auto()


class WeightState(Enum):
    """Where the present weights of a unit are: SHARDED -> GATHERING -> GATHERED -> SHARDED."""

    SHARDED = auto()  # not in the unit's slot
    GATHERING = auto()  # on their way into the slot
    GATHERED = auto()  # in the slot


StartGather = Callable[[int, bool], Pending]  # starts to fill the slot of a unit; True: from secondary shards


def backward_order(units: int, recomputed: Iterable[range]) -> list[int]:
    """The units in the order in which a backward reads their parameters: from the last to the first.

    The forward of a range of `recomputed` units runs again before their backward. The last unit of the range
    is read once for both.
    """
    order: list[int] = []
    first_of = {chunk[-1]: chunk[0] for chunk in recomputed}
    for index in reversed(range(units)):
        order += range(first_of.get(index, index), index + 1)
    return order


class _Slot:
    """A buffer that holds the whole parameters of one unit at a time."""

    def __init__(self) -> None:
        self.holder: int | None = None  # the unit whose weights, old or present ones, are here
        self.pending: Pending | None = None  # the gather under way


class Prefetcher:
    """Fills parameter slots `prefetch` units ahead of the compute, in the order in which it reads them.

    A slot that holds a unit's present weights is not filled again: the last layers of a forward are still
    there for the backward, and units that share no slot are gathered once per step. A slot is not filled for
    a later unit while the compute has yet to read the earlier unit in it. So if the number of slots
    of a layout divides the number of units of this layout that are recomputed together, the first gather of
    each such range but the last may start only when the compute needs it.
    """

    def __init__(
        self,
        plan: CommunicationPlan,
        gather: StartGather,
        recomputed: Sequence[range] = (),
        sections: Sections = UNTIMED,
    ) -> None:
        """`recomputed`: ranges of units whose forward is repeated before the backward of their last unit."""
        self._gather, self._prefetch, self._sections = gather, plan.prefetch, sections
        self._changed = WeightState.GATHERED if plan.gathers_in_place else WeightState.SHARDED
        slots = {slot: _Slot() for slot in plan.slots}
        self._slots = [slots[slot] for slot in plan.slots]  # of each unit
        self._weights = [self._changed for _ in plan.layouts]
        self._keeps_secondary = [plan.secondary_part(layout) is not None for layout in plan.layouts]
        self._secondary_is_present = [False for _ in plan.layouts]  # False: of older weights, or empty
        self._phase, self._forward = Phase.FORWARD, list(range(len(plan.layouts)))
        self._backward = backward_order(len(plan.layouts), recomputed)
        # Where in `_backward` a unit is recomputed, and where its gradients are made.
        self._recomputed_at: dict[int, int] = {}
        self._gradients_at: dict[int, int] = {}
        for at, index in enumerate(self._backward):
            self._recomputed_at.setdefault(index, at)
            self._gradients_at[index] = at
        self._first_of = {chunk[-1]: chunk[0] for chunk in recomputed}
        self._to_recompute: int | None = None  # the last unit of the range that is being recomputed

    def begin(self, phase: Phase) -> None:
        """Start a pass in this direction."""
        self._phase, self._to_recompute = phase, None

    def weights_of(self, index: int) -> WeightState:
        """Where the present weights of a unit are."""
        return self._weights[index]

    def changed(self, index: int) -> None:
        """Unit `index` has new weights: any state -> SHARDED.

        Where they were written into the slot, there is nothing to gather: any state -> GATHERED.
        """
        self._secondary_is_present[index] = False
        self._weights[index] = self._changed

    def gather_after_step(self, stepped: Iterable[int]) -> None:
        """Start to gather, as the optimizer finishes each of `stepped`, the units that slots can hold.

        They are the units that the next forward reads first.
        """
        taken = set()
        for index in stepped:
            self.changed(index)
            if self._slots[index] not in taken:
                taken.add(self._slots[index])
                self._start(index)

    def before_forward(self, index: int) -> None:
        """Gather a unit that is about to compute, and start the next gathers.

        In the backward phase this is a recomputation.
        """
        self._need(index)
        if self._phase is Phase.FORWARD:
            self._start_ahead(self._forward, index)
            return
        if index == self._to_recompute:
            self._to_recompute = None
        self._start_ahead(self._backward, self._recomputed_at[index])

    def before_backward(self, index: int) -> None:
        """Gather what is needed now that the gradient of a unit's output has arrived.

        If the unit ends a range that is recomputed, the first unit of the range is needed first.
        """
        assert self._to_recompute is None, f"unit {self._to_recompute} was to be recomputed and was not"
        if index in self._first_of:
            self._to_recompute, first = index, self._first_of[index]
            self._need(first)
            self._start_ahead(self._backward, self._recomputed_at[first])
            return
        self._need(index)
        self._start_ahead(self._backward, self._gradients_at[index])

    def wait(self, index: int) -> None:
        """Let the compute wait for the gather into the slot of unit `index`: GATHERING -> GATHERED."""
        slot = self._slots[index]
        if slot.pending is not None:
            assert slot.holder is not None
            slot.pending.wait()
            slot.pending = None
            if self._weights[slot.holder] is WeightState.GATHERING:  # else they changed meanwhile
                self._weights[slot.holder] = WeightState.GATHERED

    def _start_ahead(self, order: list[int], at: int) -> None:
        """Start the gathers of the units that are read next, up to one whose slot has yet to be read."""
        taken = {order[at]: self._slots[order[at]]}
        for index in order[at + 1 :]:
            if index in taken:
                continue
            slot = self._slots[index]
            if len(taken) > self._prefetch or slot in taken.values():
                return
            taken[index] = slot
            self._start(index)

    def _need(self, index: int) -> None:
        """SHARDED or GATHERING -> GATHERED."""
        self._start(index)
        with self._sections(WAIT_GATHERS):
            self.wait(index)

    def _start(self, index: int) -> None:
        """SHARDED -> GATHERING; the unit that was in the slot: GATHERING or GATHERED -> SHARDED.

        The first gather of new weights refreshes the secondary shard, and later ones come from those.
        """
        if self._weights[index] is not WeightState.SHARDED:
            return
        slot = self._slots[index]
        self.wait(index)  # a gather whose result was not needed must not end later than this one
        if slot.holder is not None:
            self._weights[slot.holder] = WeightState.SHARDED
        slot.holder, self._weights[index] = index, WeightState.GATHERING
        slot.pending = self._gather(index, self._secondary_is_present[index])
        self._secondary_is_present[index] = self._keeps_secondary[index]
