"""How new weights reach the slots from which modules read them: gathered, sent as differences, or encoded."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.distributed.comm_stream import Pending, copy
from megatron_zpp.exchange.codecs import clear
from megatron_zpp.exchange.differences import apply, encode
from megatron_zpp.exchange.route import CodeFormat
from megatron_zpp.exchange.sums import largest_over_ranks
from megatron_zpp.ops.operations import Operations
from megatron_zpp.placement import within
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.difference_formats import DifferenceFormats
from megatron_zpp.zero.prefetch import Prefetcher
from megatron_zpp.zero.reads import order_after
from megatron_zpp.zero.sections import Sections
from megatron_zpp.zero.sharded_unit import Unit
from megatron_zpp.zero.weight_codes import WeightEncoder


class Weights:
    """The weights of all units, as a step or a loaded checkpoint changes them and the passes need them.

    `prefetcher` fills the slots. `formats` are those of weight differences; None where none are sent.
    """

    def __init__(
        self,
        units: list[Unit],
        communication: Communication,
        sections: Sections,
        codes: WeightEncoder | None,
        operations: Operations,
    ) -> None:
        """`codes` encodes the weights that are held as codes, `operations` messages."""
        self._units, self._legs, self._mesh = units, communication.legs, communication.plan.mesh
        self._operations, self._codes = operations, codes
        self.prefetcher = Prefetcher(
            communication.plan,
            self._fill,
            sections,
            lambda at, allowed: units[at].set_readable(allowed),
        )
        self.order = 0  # follows from the order in which slots were filled
        self._brought: dict[int, Pending] = {}  # by unit: the newest work that fills what is kept
        self._due = {index for index, unit in enumerate(units) if unit.kept is not None}  # to be brought
        self._coded = [index for index, unit in enumerate(units) if unit.layout.coded]
        self._codes_present = not self._coded  # False: master weights have changed since they were encoded
        self.formats: DifferenceFormats | None = None
        if (format := communication.plan.differences) is not None:
            device = units[0].full.device
            self.formats = DifferenceFormats(format, len(units), device)
            blocks = max(unit.layout.shard_numel for unit in units) // format.block
            self._squares = torch.zeros(2 * blocks, device=device)
        for index in range(len(units)):
            self.replaced(index)

    def write(self, unit: Unit, room: Tensor | None = None) -> None:
        """Write the gather source of a unit from its master weights: codes, a message, or its shard.

        Where weight differences are sent, that is what they are computed from, and codes follow later.
        Weights and messages go to `room` if that is given. Split master weights are the source already.
        """
        if unit.is_split:
            return
        if unit.encoded is not None and unit.message is None:
            self._encode(unit)
            return
        room = unit.gather_source if room is None else room
        if (format := unit.plan.codes) is not None:
            self._operations.quantize(unit.master.to(room.device)[None], room[None], format)
        else:
            copy(room, unit.master)

    @torch.no_grad()
    def encode_changed(self) -> None:
        """Encode the weights that are held as codes, if they are new: at a start, and after loading.

        Every rank of the job must call it before a pass. Without scales of earlier steps each weight is
        scaled by itself.
        """
        if self._codes_present:
            return
        assert self._codes is not None
        for index in self._coded:
            self.prefetcher.wait_for_gather_of(index)  # which reads the gather source
            if self._units[index].message is not None:
                self._bring(index)
        for index in self._coded:
            self.wait_for_brought(index)
        parts = (
            (name, encoded.weights[part].to(unit.full.device))
            for unit in self._units
            if (encoded := unit.encoded) is not None
            for name, part in encoded.parts(unit.layout)
        )
        self._codes.start(parts, partial(largest_over_ranks, mesh=self._mesh))
        for index in self._coded:
            self._encode(self._units[index])
            self.prefetcher.changed(index)
        self._codes_present = True

    def begin_step(self) -> None:
        """The optimizer begins to change the weights, and with them their codes."""
        if self._codes is not None:
            self._codes.begin()
        self.prefetcher.begin_step()

    def updated(self, index: int, found_inf: Tensor) -> None:
        """Send the new weights of a unit, in forward order; none changed if `found_inf` () is 1.

        What is kept is brought at once: that needs no slot, so it does not wait for the forward. Units that
        the forward reads first are gathered, as many as there are slots.
        """
        if self._units[index].kept is not None:
            self.prefetcher.wait_for_gather_of(index)  # which reads what is kept
            if self._units[index].message is None:
                self._bring(index)
            else:
                self._exchange(index, found_inf)
        self.prefetcher.updated(index)

    def replaced(self, index: int) -> None:
        """The master weights of a unit have been replaced by those of no step; what its gathers send follows.

        A reference begins with them, in bf16. Codes follow when their scales are known, which depend on the
        weights of all ranks.
        """
        self.wait_for_brought(index)
        unit = self._units[index]
        if unit.encoded is None or unit.message is not None:
            self.write(unit)
        if unit.message is not None:
            unit.own_kept.copy_(unit.gather_source.bfloat16())
        self.reference_replaced(index)

    def reference_replaced(self, index: int) -> None:
        """This rank's part of the reference of a unit's weight differences has been replaced."""
        self.wait_for_brought(index)
        if self._units[index].kept is not None:
            self._due.add(index)
        self._codes_present = not self._coded
        self.prefetcher.changed(index)

    def own_references(self) -> list[Tensor]:
        """This rank's part of the reference of each unit; a copy of the weights where no node needs one."""
        for index in range(len(self._units)):
            self.wait_for_brought(index)
        return [unit.master.clone() if unit.message is None else unit.own_kept for unit in self._units]

    def differing_references(self) -> str | None:
        """The first unit whose reference is not the same on all nodes, and the ranks; None if all are.

        Every rank must call it, and all get the same answer. It waits for the device, and brings references
        that no pass has read yet.
        """
        units = [unit for unit in self._units if unit.message is not None]
        for unit in units:
            if unit.number in self._due:
                self._bring(unit.number)
            self.wait_for_brought(unit.number)
        digests = torch.stack([_digest(unit.reference) for unit in units])  # (units,)
        found = [torch.empty_like(digests) for _ in range(self._mesh.world_size)]
        dist.all_gather(found, digests)
        by_rank = torch.stack(found).cpu()
        plans = {unit.plan.bring: unit.plan for unit in units}
        holders_of = {bring: plan.holders for bring, plan in plans.items()}
        for unit, digest in zip(units, by_rank.T, strict=True):
            holders = holders_of[unit.plan.bring]
            ranks = [rank for rank, holder in enumerate(holders) if digest[rank] != digest[holder]]
            if ranks:
                name = unit.names[0].rsplit(".", 1)[0]
                return f"unit {unit.number} (with {name}) on ranks {', '.join(map(str, ranks))}"
        return None

    def wait_for_brought(self, index: int) -> None:
        """Let the compute wait until what is kept of a unit has arrived, and what was sent may change."""
        if index in self._brought:
            self._brought[index].wait()

    def _fill(self, index: int) -> Pending:
        """Start to fill a unit's slot, from what is kept if something is, unless it was written in place."""
        unit, leg = self._units[index], self._legs[index].fill
        self.order = order_after(self.order, index)
        if unit.kept is None:
            return leg.run(unit.gather_source, unit.full, self._decoding(unit, unit.full))
        if index in self._due:
            self._bring(index)
        source = unit.kept
        if unit.message is not None and unit.encoded is not None:  # codes of the reference
            source = unit.encoded.codes
        return leg.run(source, unit.full, after=self._brought[index])

    def _bring(self, index: int) -> None:
        """Start to fill what is kept with weights. Where a reference is kept, with all of what it is."""
        unit = self._units[index]
        assert unit.kept is not None
        self._due.discard(index)
        source, take = unit.own_kept, None
        if unit.message is None:
            source, take = unit.gather_source, self._decoding(unit, unit.kept)
        self._brought[index] = self._legs[index].bring.run(source, unit.kept, take)

    def _exchange(self, index: int, found_inf: Tensor) -> None:
        """Move the reference of a unit towards the weights of all owners, by their differences.

        The messages have the same format on all ranks. The sums of the squares of this rank's difference and
        of what codes miss of it decide on later formats.
        """
        unit, formats = self._units[index], self.formats
        assert formats is not None
        assert unit.message is not None
        sent = formats.sent(index)
        squares = self._squares[: 2 * (unit.layout.shard_numel // formats.format.block)].view(2, -1)
        message = encode(
            self._operations,
            unit.gather_source,
            unit.own_kept,
            unit.message,
            found_inf,
            coded=formats.format,
            sent=sent,
            squares=squares,
        )
        torch.sum(squares, dim=1, dtype=torch.float64, out=formats.measured[index])
        take = partial(self._apply, unit, sent)
        self._brought[index] = self._legs[index].bring.run(message, unit.reference, take)

    def _apply(self, unit: Unit, sent: CodeFormat, messages: Tensor) -> None:
        """Codes have no zero, so blocks that end in a gap would write noise there."""
        parts = len(unit.reference) // unit.layout.shard_numel
        apply(self._operations, messages.view(parts, -1), unit.reference, sent)
        clear(unit.reference, unit.gaps)
        if unit.encoded is not None:
            self._encode(unit)

    def _encode(self, unit: Unit) -> None:
        """Write this rank's codes of a unit whose weights are held so, and its other parameters beside."""
        assert self._codes is not None
        assert unit.encoded is not None
        owned, weights, codes = unit.encoded
        weights = weights.to(codes.device)  # those of an offloaded optimizer are on the CPU
        for name, part in unit.encoded.parts(unit.layout):
            self._codes.encode(name, weights[part], codes[part])
        if unit.layout.wide.start in owned:
            wide = within(unit.layout.wide, owned)
            room = codes[wide.start : 2 * wide.stop - wide.start].view(unit.parameters[0].dtype)
            room.copy_(weights[wide])

    def _decoding(self, unit: Unit, target: Tensor) -> Callable[[Tensor], None] | None:
        """What decodes the messages of weights, if they travel as codes."""
        format, operations = unit.plan.codes, self._operations
        if format is None:
            return None
        parts = len(target) // len(unit.owned)
        return lambda messages: operations.dequantize(
            messages.view(parts, -1), target.view(parts, -1), format
        )


def _digest(flat: Tensor) -> Tensor:
    """A hash () int64 of the bits of an fp32 tensor (n,), in pieces, so that it takes little memory.

    Sums with odd factors that differ from element to element see a changed bit and a swap.
    """
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), 1 << 22):
        bits = flat[start : start + (1 << 22)].view(torch.int32).long()
        place = torch.arange(start, start + len(bits), device=flat.device)
        total += (bits * (place * 0x9E3779B1 | 1)).sum()
    return total
