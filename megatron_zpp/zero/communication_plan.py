"""How the weights and gradients of a run travel, as values: routes, slots and the order of reads.

A plan needs no tensors and no process groups, so one process can plan for every rank of any mesh. The engine
builds its streams, exchanges and buffers from it, --dry-run reads the same plan, and tests compare the
traffic ledger with it.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice

import torch

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.exchange.rooms import ReductionRooms, lanes, reduction_rooms, widest
from megatron_zpp.exchange.route import Route, nbytes
from megatron_zpp.mesh import Axis, Mesh
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.placement import Layout
from megatron_zpp.zero.reads import Reads
from megatron_zpp.zero.unit_plan import UnitPlan, unit_plan


@dataclass(frozen=True, kw_only=True)
class CommunicationPlan:
    """How the weights and gradients of this rank's run travel, and the memory that this takes.

    `units` and `slots` have an entry for each unit, in forward order. A slot is the buffer that holds a
    unit's gathered parameters; units with equal slots have equal layouts and take turns.
    """

    mesh: Mesh
    units: tuple[UnitPlan, ...]
    made: torch.dtype  # in which a backward makes gradients
    copy_engines: bool  # whether these move what ranks of one node send
    prefetch: int  # units gathered ahead of the one that computes
    slots: tuple[int, ...]
    reduction_slots: tuple[int, ...]  # units with equal ones have one reduction under way at a time
    reads: Reads

    @cached_property
    def trained(self) -> tuple[UnitPlan, ...]:
        """The plans of units with gradients."""
        return tuple(each for each in self.units if not each.layout.frozen)

    @cached_property
    def weight_codes(self) -> QuantFormat | None:
        """The format of the messages that the optimizer writes; None where it writes weights."""
        return next((each.codes for each in self.units if each.codes is not None), None)

    @cached_property
    def differences(self) -> LloydMaxFormat | None:
        """The format in which weight differences travel; None where weights themselves do.

        A few units have more bits in a few steps, see `DifferenceFormats`.
        """
        return next((each.differences for each in self.units if each.differences is not None), None)

    @property
    def gathers_in_place(self) -> bool:
        """Whether the optimizer writes all of a unit into its slot, so that nothing has to be gathered."""
        return not any(each.first for each in self.units)

    def sums_gradients(self, micro_batches: int, *, accepts_16bit: bool) -> bool:
        """Whether the optimizer takes fp32 sums, not the gradients of a step's only micro-batch as made."""
        return not (self.mesh.shard_ranks == 1 and micro_batches == 1 and accepts_16bit)

    @cached_property
    def reductions(self) -> dict[Route, list[Layout]]:
        """The routes of gradients, and the layouts of the units that each has."""
        found: dict[Route, list[Layout]] = {}
        for each in self.trained:
            found.setdefault(each.gradients, []).append(each.layout)
        return found

    def peer_writes(self, gradients: Route) -> bool:
        """Whether ranks write gradients into each other's memory: those of one node, in one stage."""
        if not self.copy_engines or len(gradients) != 1 or gradients[0].codes:
            return False
        return self.mesh.share_a_node(self.mesh.ranks(*gradients[0].axes))

    @cached_property
    def rooms(self) -> dict[Route, ReductionRooms]:
        """The buffers of reductions by route, where something is sent."""
        return {
            route: reduction_rooms(route, layouts, self.mesh, self.made, peer_writes=self.peer_writes(route))
            for route, layouts in self.reductions.items()
            if route
        }

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of slots, and of what this rank's gathers send where that is not a part of them."""
        slots = {slot: each.slot for slot, each in zip(self.slots, self.units, strict=True)}
        return sum(slot.nbytes for slot in slots.values()) + sum(each.sent_bytes for each in self.units)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of secondary shards, or of this rank's parts of the references."""
        return sum(each.memory["kept"][1].nbytes for each in self.units if "kept" in each.memory)

    @property
    def residual_bytes(self) -> int:
        """Bytes of what codes have lost of gradients, where that is sent with later ones."""
        return sum(residual.nbytes for each in self.units for residual in each.residuals)

    def message_room(self, stages: Route) -> int:
        """Bytes of the largest message that this rank brings to these stages in any step; 0 without codes."""
        if not stages or not stages[0].codes:
            return 0
        numels = [len(each.owned) for each in self.units if stages == each.first]
        numels += [each.layout.shard_numel for each in self.units if stages == each.sums]
        return nbytes(widest(stages[0].format), max(numels))

    @cached_property
    def arena_bytes(self) -> int:
        """Bytes of the buffers of gathers and reductions."""
        relayed = 0
        for stages in {leg for each in self.units for leg in (each.first, each.sums) if leg}:
            room, shards = self.message_room(stages), 1
            for at, stage in enumerate(stages):
                shards *= stage.ranks
                turns = max(2 if at + 1 < len(stages) else 1, lanes(stages, at, self.mesh))
                relayed += turns * shards * room
        return relayed + sum(rooms.nbytes for rooms in self.rooms.values())


def plan_communication(
    zero: ZeroConfig,
    mesh: Mesh,
    layouts: Sequence[Layout],
    *,
    compute_dtype: torch.dtype,
    reduce_in_bf16: bool,
    copy_engines: bool,
    reads: Reads | None = None,
    inside_nodes: Collection[int] = (),
) -> CommunicationPlan:
    """The plan of a rank for units of these layouts.

    Weights travel in `compute_dtype` or quantised, gradients quantised, in bf16 (`reduce_in_bf16`), or as
    `gradient_route` says. `reads`: how the passes read the units; by default each once in the forward and in
    the backward. `inside_nodes`: the units that each node holds by itself, beside those with matrices
    that Muon trains.
    """
    reads = reads or Reads(tuple((unit,) for unit in range(len(layouts))))
    forward, _ = orders = reads.orders
    kinds = [
        (
            layout,
            _cut(zero, layout, inside=unit in inside_nodes or bool(layout.hull(of_matrices=True))),
            unit if unit in reads.around else None,
        )
        for unit, layout in enumerate(layouts)
    ]
    first = {kind: unit for unit, kind in reversed([*enumerate(kinds)])}
    numbers = [first[kind] for kind in kinds]  # of kinds, because layouts take long to compare
    slots = tuple(_slots(numbers, orders, zero.prefetched_units if zero.zero_stage >= 3 else None))
    counts = Counter(numbers)
    slots_of = Counter(number for number, _ in {*zip(numbers, slots, strict=True)})
    units = tuple(
        unit_plan(
            zero,
            mesh,
            layout,
            compute_dtype,
            axes=axes,
            in_turn=slots_of[number] < counts[number],
            reduce_in_bf16=reduce_in_bf16,
        )
        for (layout, axes, _), number in zip(kinds, numbers, strict=True)
    )
    fed_back = {each.gradients for each in units if each.residuals}  # which other units may have too
    units = tuple(
        replace(each, gradients=(*route[:-1], replace(route[-1], feedback=True)))
        if (route := each.gradients) in fed_back
        else each
        for each in units
    )
    return CommunicationPlan(
        mesh=mesh,
        units=units,
        made=compute_dtype,
        copy_engines=copy_engines,
        prefetch=zero.prefetched_units,
        slots=slots,
        reduction_slots=tuple(_slots(numbers, (forward,), 1)),  # for two units in a row
        reads=reads,
    )


def _cut(zero: ZeroConfig, layout: Layout, *, inside: bool) -> tuple[Axis, ...]:
    """The axes over which the states of a unit are cut; `inside`: each node holds it by itself."""
    if zero.zero_stage == 0:
        return ()
    return layout.axes[:1] if inside and layout.axes[1].size > 1 else layout.axes


def _slots(
    kinds: Sequence[Hashable], orders: Sequence[Sequence[tuple[int, ...]]], ahead: int | None
) -> Iterator[int]:
    """A slot for each unit; None: each has its own.

    Units of one kind take turns in as many as they are, at most, among the units of any place and of the
    `ahead` places with other units that follow it in one of the `orders` in which units are read.
    """
    if ahead is None:
        yield from range(len(kinds))
        return
    most = Counter(set(kinds))
    for order in orders:
        for at in range(len(order)):
            near = dict.fromkeys(order[at : at + 2 * (ahead + 1)])  # no order has a unit more than twice
            units = chain.from_iterable(islice(near, ahead + 1))
            for kind, count in Counter(kinds[unit] for unit in units).items():
                most[kind] = max(most[kind], count)
    slots: dict[Hashable, list[int]] = {kind: [] for kind in most}
    turns, made = Counter[Hashable](), 0
    for kind in kinds:
        if len(slots[kind]) < most[kind]:
            slots[kind].append(made)
            made += 1
        yield slots[kind][turns[kind] % most[kind]]
        turns[kind] += 1
