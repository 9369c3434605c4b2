"""What the forward of every rank reads after the owners' AdamW, by the format in which weights travel."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.emulation.flat_model import FlatModel, UnitRun
from benchmarks.emulation.gradients import message_of
from benchmarks.emulation.rungs import Rung, Weights
from megatron_zpp.exchange.differences import apply, encode
from megatron_zpp.exchange.route import eight_bits
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.difference_formats import DifferenceFormats

# Sends the weights of a range: master (n,) fp32, compute (n,) in the format of the compute, skip () where
# nothing may change unless it is 0. Every rank then holds the same bits in `compute`.
WeightExchange = Callable[[Tensor, Tensor, Tensor], None]


def cast(master: Tensor, compute: Tensor, skip: Tensor, *, rounded: bool) -> None:
    """Weights as they compute, or rounded to 16 bits first."""
    compute.copy_(master.bfloat16() if rounded else master)


def code(
    master: Tensor, compute: Tensor, skip: Tensor, *, operations: Operations, format: QuantFormat
) -> None:
    """The engine's block codes of whole weights (qwZ)."""
    operations.dequantize(message_of(operations, format, master), compute[None], format)


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
        size = eight_bits(formats.format).message_bytes(len(master))
        self._message = torch.empty(size, dtype=torch.uint8, device=master.device)
        self._squares = torch.empty(2 * (len(master) // formats.format.block), device=master.device)

    def __call__(self, master: Tensor, compute: Tensor, skip: Tensor) -> None:
        """`DifferenceFormats.measured` gets what this range adds to each unit."""
        for run in self._runs:
            coded = self._formats.format
            weights, reference = master[run.here], self.reference[run.here]
            sent = self._formats.sent(run.unit)
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


class WeightExchanges:
    """Makes the exchanges of a model's ranges, and decides with the engine's rule which units are raised."""

    def __init__(self, rung: Rung, operations: Operations, flat: FlatModel) -> None:
        self._rung, self._operations, self._flat = rung, operations, flat
        self._formats: dict[str, DifferenceFormats] = {}  # by the name of the format

    def of(self, format: Weights, here: slice) -> WeightExchange:
        """The exchange of a range, which begins with its master weights."""
        if format in ("plain", "bf16", "none"):
            return partial(cast, rounded=format == "bf16")
        rung, operations = self._rung, self._operations
        if format == "int8":
            return partial(code, operations=operations, format=QuantFormat("int8", rung.weight_block))
        bits, master, gaps = int(format[-1]), self._flat.master[here], self._flat.gaps[here]
        if format not in self._formats:
            codes = LloydMaxFormat(bits, rung.weight_block)
            self._formats[format] = DifferenceFormats(codes, self._flat.units, master.device)
        return Difference(operations, master, gaps, self._flat.runs_of(here), self._formats[format])

    def begin_step(self) -> int:
        """Decides as the engine does, on what the step before measured; returns how many units are raised."""
        for formats in self._formats.values():
            formats.decide(formats.measured)
            formats.measured.zero_()
        return sum(formats.raised for formats in self._formats.values())
