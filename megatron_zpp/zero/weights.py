"""How new weights reach the slots from which modules read them: gathered, sent as differences, or encoded."""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.build import write_gather_source
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.difference_formats import DifferenceFormats
from megatron_zpp.zero.prefetch import Prefetcher
from megatron_zpp.zero.reference_check import differing_references
from megatron_zpp.zero.sections import Sections
from megatron_zpp.zero.sharded_unit import Unit
from megatron_zpp.zero.weight_codes import GatherSources, WeightEncoder, write_all_codes


class Weights:
    """The weights of all units, as a step or a loaded checkpoint changes them and the passes need them.

    `prefetcher` fills the slots, `sources` writes what the gathers send. `formats` are those of weight
    differences; None where none are sent.
    """

    def __init__(
        self,
        units: list[Unit],
        communication: Communication,
        topology: Topology,
        sections: Sections,
        *,
        formats: DifferenceFormats | None = None,
        codes: WeightEncoder | None = None,
    ) -> None:
        """`topology` is that of the job; `codes` encodes the weights that are held as codes, if some are."""
        self._units, self._communication, self._topology = units, communication, topology
        self.formats = formats
        self.sources = GatherSources(communication.gather, codes)
        self.prefetcher = Prefetcher(communication.plan, self._gather, sections, self._set_readable)
        self._trained = [index for index, unit in enumerate(units) if not unit.frozen]
        self._exchanged: dict[int, Pending] = {}  # by unit: the newest exchange of weight differences
        self._codes = codes
        self._codes_present = codes is None  # False: master weights have changed since they were encoded

    @torch.no_grad()
    def encode_changed(self) -> None:
        """Encode the weights that are held as codes, if they are new: at a start, and after loading.

        Every rank of the job must call it before a pass.
        """
        if self._codes_present:
            return
        assert self._codes is not None
        for index, unit in enumerate(self._units):
            self.prefetcher.wait_for_gather_of(index)  # which reads the gather source
            if unit.layout.coded and self._communication.differences is not None:
                self._exchanged[index] = self._communication.differences.publish(unit.reference)
        for exchanged in self._exchanged.values():
            exchanged.wait()
        write_all_codes(self._units, self._codes, self.sources, self._topology)
        for index, unit in enumerate(self._units):
            if unit.layout.coded:
                self.prefetcher.changed(index)
        self._codes_present = True

    def publish(self, stepped: Iterable[Unit], found_inf: Tensor) -> None:
        """Send the new weights of a step, unit by unit as the optimizer yields them.

        Those which the next forward reads first are gathered, as many as there are slots.
        """
        if self._codes is not None:
            self._codes.begin()
        self.prefetcher.gather_after_step(self._exchange(stepped, found_inf))

    def replaced(self, index: int) -> None:
        """The master weights of a unit have been replaced; what its gathers send follows."""
        self._forget_exchange(index)
        write_gather_source(self._communication, self._units[index])
        self.reference_replaced(index)

    def reference_replaced(self, index: int) -> None:
        """The reference of a unit's weight differences has been replaced."""
        self._forget_exchange(index)
        self._codes_present = self._codes is None
        self.prefetcher.changed(index)

    def _forget_exchange(self, index: int) -> None:
        """Wait for the newest exchange of a unit, which changes its reference, and forget it."""
        exchanged = self._exchanged.pop(index, None)
        if exchanged is not None:
            exchanged.wait()

    @property
    def have_references(self) -> bool:
        """Whether weights travel as differences from a reference."""
        return self._communication.differences is not None

    def references(self) -> list[Tensor]:
        """The reference of each unit, after all exchanges so far."""
        for exchanged in self._exchanged.values():
            exchanged.wait()
        return [unit.reference for unit in self._units]

    def own_references(self) -> list[Tensor]:
        """This rank's part of the reference of each unit."""
        differences = self._communication.differences
        assert differences is not None
        return [differences.own_part(reference) for reference in self.references()]

    def differing_references(self) -> str | None:
        """The first unit whose reference is not the same on all nodes, and the ranks; None if all are.

        Every rank must call it, and all get the same answer. It waits for the device.
        """
        plan = self._communication.plan
        return differing_references(
            self._units,
            self.references(),
            self._topology,
            groups=plan.reference_groups,
            tensor=plan.grid.stride,
        )

    def _set_readable(self, index: int, readable: bool) -> None:
        self._units[index].guard.set_readable(readable)

    def _gather(self, index: int, from_secondary: bool) -> Pending:
        """Start to fill a unit's slot, from the secondary shards of this rank's group or from all ranks."""
        unit, communication = self._units[index], self._communication
        if communication.differences is not None:
            after = None if from_secondary else self._exchanged.get(index)
            if not from_secondary and after is None:
                after = communication.differences.publish(unit.reference)
            assert communication.secondary is not None
            sent = unit.reference if unit.encoded is None else unit.encoded.codes
            return communication.secondary.gather(unit.full, sent, after=after)
        if from_secondary:
            assert communication.secondary is not None
            assert unit.secondary is not None
            return communication.secondary.gather(unit.full, unit.secondary)
        return communication.gather.gather(unit.full, unit.gather_source, unit.secondary)

    def _exchange(self, stepped: Iterable[Unit], found_inf: Tensor) -> Iterator[int]:
        """Yield the units whose new weights can be gathered.

        Weight differences cross nodes in forward order, unit by unit. They need no slot, so none of them
        waits for the forward.
        """
        differences = self._communication.differences
        for index, unit in zip(self._trained, stepped, strict=True):
            if differences is not None:
                assert unit.message is not None
                self.prefetcher.wait_for_gather_of(index)  # which reads the reference
                assert self.formats is not None
                self._exchanged[index] = differences.exchange(
                    unit.gather_source,
                    unit.reference,
                    unit.message,
                    unit.gaps,
                    found_inf,
                    coded=self.formats.format,
                    sent=self.formats.sent(index),
                    measured=self.formats.measured[index],
                    then=partial(self.sources.encode, unit) if unit.encoded is not None else None,
                )
            yield index
