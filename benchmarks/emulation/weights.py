"""What the forward of every rank reads after the owners' AdamW, by the format in which weights travel."""

from typing import Protocol

import torch
from torch import Tensor

from benchmarks.emulation.rungs import Rung
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.lloyd_max import decoded
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.reference_difference import encode_difference, moved_reference

REFERENCES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class WeightExchange(Protocol):
    """Sends the weights of a range; every rank then holds the same bits."""

    def send(self, master: Tensor, compute: Tensor, *, early: bool, skip: Tensor) -> None:
        """`master` (n,) fp32 -> `compute` (n,) in the format of the compute; where `skip` () is not 0 nothing
        may change. `early`: before twice the warm-up."""


class Cast:
    """Weights as they compute, or rounded to 16 bits first."""

    def __init__(self, *, rounded: bool) -> None:
        self._rounded = rounded

    def send(self, master: Tensor, compute: Tensor, *, early: bool, skip: Tensor) -> None:
        """See WeightExchange."""
        compute.copy_(master.bfloat16() if self._rounded else master)


class Codes:
    """The engine's block codes of whole weights (qwZ)."""

    def __init__(self, operations: Operations, format: QuantFormat) -> None:
        self._operations, self._format = operations, format

    def send(self, master: Tensor, compute: Tensor, *, early: bool, skip: Tensor) -> None:
        """See WeightExchange."""
        compute.copy_(_there_and_back(self._operations, self._format, master, compute.dtype))


class Difference:
    """Lloyd-Max codes of weights less the reference, as the engine has them."""

    def __init__(
        self, operations: Operations, master: Tensor, gaps: Tensor, format: LloydMaxFormat, early_bits: int
    ) -> None:
        """The key frame: the reference is `master` in 16 bits."""
        self._operations, self._gaps = operations, gaps if gaps.any() else None
        self._format, self._early = format, LloydMaxFormat(early_bits, format.block)
        self.reference = master.bfloat16().float()
        size = max(each.message_bytes(len(master)) for each in (self._format, self._early))
        self._message = torch.empty(size, dtype=torch.uint8, device=master.device)

    def send(self, master: Tensor, compute: Tensor, *, early: bool, skip: Tensor) -> None:
        """See WeightExchange."""
        format = self._early if early else self._format
        message = self._message[: format.message_bytes(len(master))]
        self._operations.quantize_difference(master, self.reference, message, format, skip=skip)
        self._operations.add_difference(message[None], self.reference, format)
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
        rung: Rung,
    ) -> None:
        """The key frame: the reference is `master` in 16 bits."""
        self._operations, self._gaps, self._rung = operations, gaps if gaps.any() else None, rung
        self._bits, self._early_bits = bits, early_bits
        self.reference = master.bfloat16().to(REFERENCES[rung.reference])
        self._before = None if rung.weight_feedback else master.clone()

    def send(self, master: Tensor, compute: Tensor, *, early: bool, skip: Tensor) -> None:
        """See WeightExchange."""
        bits = self._early_bits if early else self._bits
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


def weight_exchange(
    format: str, rung: Rung, operations: Operations, master: Tensor, gaps: Tensor
) -> WeightExchange:
    """The exchange of a range with initial weights `master` (n,) and `gaps` (n,)."""
    if format in ("plain", "bf16"):
        return Cast(rounded=format == "bf16")
    if format.startswith("int"):
        return Codes(operations, QuantFormat(format, rung.weight_block))
    bits = int(format[-1])
    early = bits
    if rung.early_weights is not None:
        early = max(bits, int(rung.early_weights[-1]))
    if rung.varies_differences or bits == 8:
        return VariedDifference(operations, master, gaps, bits, early, rung)
    return Difference(operations, master, gaps, LloydMaxFormat(bits, rung.weight_block), early)


def _there_and_back(
    operations: Operations, format: QuantFormat, values: Tensor, dtype: torch.dtype
) -> Tensor:
    message = torch.empty(1, format.message_bytes(len(values)), dtype=torch.uint8, device=values.device)
    operations.quantize(values[None], message, format)
    output = torch.empty(1, len(values), dtype=dtype, device=values.device)
    operations.dequantize(message, output, format)
    return output[0]
