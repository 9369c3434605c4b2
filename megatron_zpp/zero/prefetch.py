"""Decides which unit's parameters are gathered when: ahead of the compute that reads them, in its order.

Units and slots are numbers here, without tensors, so that --dry-run walks through a step with the same code.
So are places: the modules that read units, in the order of the forward (zero/reads.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


StartGather = Callable[[int], Pending]  # starts to fill the slot of a unit
SetReadable = Callable[[int, bool], None]  # the parameters of a unit may be read from now on, or no more


@dataclass(eq=False)
class _Slot:
    """A buffer that holds the whole parameters of one unit at a time."""

    holder: int | None = None  # the unit whose weights, old or present ones, are here
    pending: Pending | None = None  # the gather under way


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
        sections: Sections = UNTIMED,
        set_readable: SetReadable = lambda unit, readable: None,
    ) -> None:
        """The parameters of all units count as readable until `set_readable` is called."""
        self._gather, self._prefetch, self._sections = gather, plan.prefetch, sections
        self._waits_for_kept = [bool(each.bring) for each in plan.units]
        # Whether the optimizer writes weights into slots, which no units share.
        self.always_gathered = plan.gathers_in_place
        self._present: set[int] = set()  # else: units whose present weights are in slots, or under way
        slots = {slot: _Slot() for slot in plan.slots}
        self._slots = [slots[slot] for slot in plan.slots]  # of each unit
        self._taken: set[_Slot] = set()  # in this step, by units whose new weights are gathered
        self._full = False  # nothing more is gathered before the forward
        self._readable, self._set_readable = [True for _ in plan.units], set_readable
        for index in range(len(plan.units)):
            self._allow_reads(index, self.always_gathered)
        self._phase, reads = Phase.FORWARD, plan.reads
        self._forward, self._backward = reads.orders
        # Where in `_backward` the gradients of a place are made, its last reading; where it is recomputed.
        self._gradients_at = {place: at for at, place in enumerate(reads.backward)}
        self._recomputed_at = {place: reads.backward.index(place) for place in reads.backward}
        self._first_of = {chunk[-1]: chunk[0] for chunk in reads.recomputed}
        self._to_recompute: int | None = None  # the last place of the range that is being recomputed
        self._recomputed: set[int] = set()  # the last places of those that this pass has begun to recompute
        self.stepped: set[int] = set()  # units that --optimizer-in-backward has changed in this backward

    def begin(self, phase: Phase) -> None:
        self._phase, self._to_recompute, self._recomputed, self.stepped = phase, None, set(), set()

    def weights_of(self, index: int) -> WeightState:
        """Where the present weights of a unit are."""
        if not self.always_gathered and index not in self._present:
            return WeightState.SHARDED
        return WeightState.GATHERED if self._slots[index].pending is None else WeightState.GATHERING

    def changed(self, index: int) -> None:
        """Unit `index` has new weights: any state -> SHARDED; -> GATHERED where they are in the slot."""
        self._present.discard(index)
        self._allow_reads(index, self.always_gathered)

    def begin_step(self) -> None:
        """The optimizer begins to change the weights."""
        self._taken, self._full = set(), False

    def updated(self, index: int) -> None:
        """The optimizer has changed unit `index`: start to gather it, if the forward reads it soon.

        Of the units that share a slot, the first one is gathered. Gathers run in the order in which they
        start. One from what is kept also waits until that has been brought. Then nothing is gathered behind
        the first unit whose slot is taken: it would hold up what the forward needs sooner.
        """
        self.changed(index)
        if self._slots[index] in self._taken:
            self._full = self._full or self._waits_for_kept[index]
        elif not self._full:
            self._taken.add(self._slots[index])
            self._start(index)

    def before_forward(self, place: int) -> None:
        """Gather the units of a place that is about to compute, or compute again; start the next gathers."""
        if self._phase is Phase.FORWARD:
            self._read(self._forward, place)
            return
        if self.stepped.intersection(self._forward[place]):
            raise RuntimeError(
                f"--optimizer-in-backward: of units(), number {place} from 0 is computed again in the "
                "backward that has changed its weights; train without it, or recompute its uses together"
            )
        if place == self._to_recompute:
            self._to_recompute = None
        self._read(self._backward, self._recomputed_at[place])

    def end_reads(self, place: int) -> None:
        """Let nothing read the units of a place that has computed before it, or its backward, computes."""
        if self._phase is Phase.FORWARD:
            for index in self._forward[place]:
                self._allow_reads(index, self.always_gathered)

    def before_backward(self, place: int) -> None:
        """Gather what is needed now that the gradient of one of a place's outputs has arrived.

        If the place ends a range that is recomputed, the first unit of the range is needed first. Nothing is
        needed where the backward reads no parameters.
        """
        if place not in self._gradients_at or place == self._to_recompute:
            return
        if self._to_recompute is not None:
            raise RuntimeError(
                f"recomputed_units(): of units(), number {self._to_recompute} from 0 was to be recomputed "
                "before its backward, and was not"
            )
        at = self._gradients_at[place]
        if place in self._first_of and place not in self._recomputed:
            self._to_recompute = place
            self._recomputed.add(place)
            at = self._recomputed_at[self._first_of[place]]
        self._read(self._backward, at)

    def wait_for_gather_of(self, index: int) -> None:
        """Let the compute wait for a gather of unit `index`, if any: it may read what is about to change."""
        if self._slots[index].holder == index:
            self._wait(index)

    def _wait(self, index: int) -> None:
        """Let the compute wait for the gather into the slot of unit `index`: GATHERING -> GATHERED."""
        slot = self._slots[index]
        if slot.pending is not None:
            slot.pending.wait()
            slot.pending = None

    def _read(self, order: Sequence[tuple[int, ...]], at: int) -> None:
        """Gather what is read now, and start what is read next, up to a unit whose slot is yet to be read."""
        for index in order[at]:
            self._need(index)
        found, taken = {order[at]}, {self._slots[index] for index in order[at]}
        for units in order[at + 1 :]:
            if units in found:
                continue
            if len(found) > self._prefetch or any(self._slots[index] in taken for index in units):
                return
            found.add(units)
            for index in units:
                taken.add(self._slots[index])
                self._start(index)

    def _need(self, index: int) -> None:
        """SHARDED or GATHERING -> GATHERED, and readable."""
        self._start(index)
        with self._sections(WAIT_GATHERS):
            self._wait(index)
        self._allow_reads(index, True)

    def _allow_reads(self, index: int, allowed: bool) -> None:
        if self._readable[index] is not allowed:
            self._set_readable(index, allowed)  # which may raise
            self._readable[index] = allowed

    def _start(self, index: int) -> None:
        """SHARDED -> GATHERING; the unit that was in the slot: GATHERING or GATHERED -> SHARDED."""
        if self.always_gathered or index in self._present:
            return
        slot = self._slots[index]
        self._wait(index)  # a gather whose result was not needed must not end later than this one
        if slot.holder is not None:
            self._present.discard(slot.holder)
            self._allow_reads(slot.holder, False)
        slot.holder = index
        self._present.add(index)
        slot.pending = self._gather(index)
