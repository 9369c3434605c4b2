"""What the forward of every rank reads after the owners' AdamW, by the format in which weights travel."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.emulation.flat_model import FlatModel, UnitRun
from benchmarks.emulation.rungs import Rung, Weights
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.lloyd_max import decoded
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.reference_difference import encode_difference, moved_reference
from megatron_zpp.zero.collectives.differences import apply, encode
from megatron_zpp.zero.difference_formats import EARLY_BITS, DifferenceFormats
from megatron_zpp.zero.hop import eight_bits

REFERENCES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class WeightExchange(Protocol):
    """Sends the weights of a range; every rank then holds the same bits."""

    def send(self, master: Tensor, compute: Tensor, *, iteration: int, skip: Tensor) -> None:
        """`master` (n,) fp32 -> `compute` (n,) in the format of the compute; where `skip` () is not 0 nothing
        may change."""


class Cast:
    """Weights as they compute, or rounded to 16 bits first."""

    def __init__(self, *, rounded: bool) -> None:
        self._rounded = rounded

    def send(self, master: Tensor, compute: Tensor, *, iteration: int, skip: Tensor) -> None:
        """See WeightExchange."""
        compute.copy_(master.bfloat16() if self._rounded else master)


class Codes:
    """The engine's block codes of whole weights (qwZ)."""

    def __init__(self, operations: Operations, format: QuantFormat) -> None:
        self._operations, self._format = operations, format

    def send(self, master: Tensor, compute: Tensor, *, iteration: int, skip: Tensor) -> None:
        """See WeightExchange."""
        compute.copy_(_there_and_back(self._operations, self._format, master, compute.dtype))


class Difference:
    """Lloyd-Max codes of weights less the reference, as the engine has them."""

    def __init__(
        self,
        operations: Operations,
        master: Tensor,
        gaps: Tensor,
        runs: Sequence[UnitRun],
        formats: DifferenceFormats,
    ) -> None:
        """The key frame: the reference is `master` in 16 bits. `runs` and `gaps` are those of the range."""
        self._operations, self._gaps = operations, gaps if gaps.any() else None
        self._runs, self._formats = runs, formats
        self.reference = master.bfloat16().float()
        size = eight_bits(formats.coded(0, 0)).message_bytes(len(master))
        self._message = torch.empty(size, dtype=torch.uint8, device=master.device)
        self._squares = torch.empty(2 * (len(master) // formats.coded(0, 0).block), device=master.device)

    def send(self, master: Tensor, compute: Tensor, *, iteration: int, skip: Tensor) -> None:
        """See WeightExchange. `DifferenceFormats.measured` gets what this range adds to each unit."""
        for run in self._runs:
            coded = self._formats.coded(run.unit, iteration)
            weights, reference = master[run.here], self.reference[run.here]
            sent = self._formats.sent(run.unit, iteration)
            squares = self._squares[: 2 * (len(weights) // coded.block)].view(2, -1)
            message = encode(
                self._operations,
                weights,
                reference,
                self._message,
                skip,
                coded=coded,
                sent=sent,
                squares=squares,
            )
            apply(self._operations, message[None], reference, sent)
            self._formats.measured[run.unit] += squares.sum(dim=1, dtype=torch.float64)
        if self._gaps is not None:
            self.reference.masked_fill_(self._gaps, 0)
        compute.copy_(self.reference)


class VariedDifference:
    """The same in plain torch, with what the engine lacks: outliers, no feedback, a bf16 reference.

    8 bits are the engine's int8 codes of the difference.
    """

    def __init__(
        self,
        operations: Operations,
        master: Tensor,
        gaps: Tensor,
        bits: int,
        early_bits: int,
        early_iterations: int,
        rung: Rung,
    ) -> None:
        """The key frame: the reference is `master` in 16 bits."""
        self._operations, self._gaps, self._rung = operations, gaps if gaps.any() else None, rung
        self._bits, self._early_bits, self._early_iterations = bits, early_bits, early_iterations
        self.reference = master.bfloat16().to(REFERENCES[rung.reference])
        self._before = None if rung.weight_feedback else master.clone()

    def send(self, master: Tensor, compute: Tensor, *, iteration: int, skip: Tensor) -> None:
        """See WeightExchange."""
        bits = self._early_bits if iteration < self._early_iterations else self._bits
        known = self.reference if self._before is None else self._before
        moved = self._eight_bits(master, known) if bits == 8 else self._coded(master, known, bits, skip)
        self.reference.copy_(torch.where(skip != 0, self.reference, moved))
        if self._gaps is not None:
            self.reference.masked_fill_(self._gaps, 0)
        if self._before is not None:
            self._before.copy_(master)
        compute.copy_(self.reference)

    def _coded(self, master: Tensor, known: Tensor, bits: int, skip: Tensor) -> Tensor:
        block, outliers = self._rung.weight_block, self._rung.weight_outliers
        blocks, old = self.reference.view(-1, block), known.view(-1, block)
        new = master.view(-1, block)
        if outliers:
            return self._with_outliers(new, old, bits, outliers).view(-1)
        codes, stored = encode_difference(new, old, bits)
        stored = torch.where(skip != 0, torch.zeros_like(stored), stored)
        return moved_reference(blocks, codes, stored, bits).view(-1)

    def _with_outliers(self, new: Tensor, old: Tensor, bits: int, outliers: int) -> Tensor:
        """The largest differences of a block travel as bf16 numbers; the codes are those of the others."""
        difference = new - old.float()
        place = difference.abs().topk(outliers, dim=1).indices
        exact = difference.gather(1, place).bfloat16().float()
        rest = difference.scatter(1, place, 0.0)
        codes, stored = encode_difference(rest, torch.zeros_like(rest), bits)
        change = decoded(codes, stored, bits).scatter(1, place, exact)
        blocks = self.reference.view(new.shape)
        return (blocks.float() + change).to(blocks.dtype)

    def _eight_bits(self, master: Tensor, known: Tensor) -> Tensor:
        format = QuantFormat("int8", self._rung.weight_block)
        change = _there_and_back(self._operations, format, master - known.float(), torch.float32)
        return (self.reference.float() + change).to(self.reference.dtype)


class WeightExchanges:
    """Makes the exchanges of a model's ranges, and decides with the engine's rule which units are raised."""

    def __init__(self, rung: Rung, operations: Operations, flat: FlatModel, early_iterations: int) -> None:
        self._rung, self._operations, self._flat, self._early = rung, operations, flat, early_iterations
        self._formats: dict[str, DifferenceFormats] = {}  # by the name of the format

    def of(self, format: Weights, here: slice) -> WeightExchange:
        """The exchange of a range, which begins with its master weights."""
        if format in ("plain", "bf16"):
            return Cast(rounded=format == "bf16")
        rung, operations = self._rung, self._operations
        if format == "int8" or format == "int4":
            return Codes(operations, QuantFormat(format, rung.weight_block))
        bits, master, gaps = int(format[-1]), self._flat.master[here], self._flat.gaps[here]
        early = bits if rung.early_weights is None else max(bits, int(rung.early_weights[-1]))
        if rung.varies_differences or bits == 8:
            return VariedDifference(operations, master, gaps, bits, early, self._early, rung)
        if format not in self._formats:
            iterations = self._early if rung.early_weights == f"delta{EARLY_BITS}" else 0
            codes = LloydMaxFormat(bits, rung.weight_block)
            self._formats[format] = DifferenceFormats([codes] * self._flat.units, iterations, master.device)
        return Difference(operations, master, gaps, self._flat.runs_of(here), self._formats[format])

    def begin_step(self) -> int:
        """Decides as the engine does, on what the step before measured; returns how many units are raised."""
        for formats in self._formats.values():
            formats.decide(formats.measured)
            formats.measured.zero_()
        return sum(formats.raised for formats in self._formats.values())


def _there_and_back(
    operations: Operations, format: QuantFormat, values: Tensor, dtype: torch.dtype
) -> Tensor:
    message = torch.empty(1, format.message_bytes(len(values)), dtype=torch.uint8, device=values.device)
    operations.quantize(values[None], message, format)
    output = torch.empty(1, len(values), dtype=dtype, device=values.device)
    operations.dequantize(message, output, format)
    return output[0]
