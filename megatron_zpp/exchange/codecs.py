"""How gradients become messages and sums: block codes, or rotated Lloyd-Max codes."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.exchange.route import CodeFormat
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.signs import Signs


class Rotation(NamedTuple):
    """The random signs of a unit in one step, and where its gradient is zero.

    Every rank that sends or sums an element must give it the same sign, so elements have numbers that all
    ranks agree on. A rotation mixes the elements of a block. So what is decoded is not zero in the gaps of
    the layout, where it must be.
    """

    signs: Signs  # of the unit's element 0
    gaps: tuple[slice, ...]  # elements of this rank's shard that belong to no parameter


def clear(flat: Tensor, gaps: tuple[slice, ...]) -> None:
    """Set these elements of `flat` (n,) to zero. There are few where sizes are multiples of a block."""
    for gap in gaps:
        flat[gap].zero_()


class Feedback(NamedTuple):
    """What codes have lost of some elements of a gradient so far: the next message has it too (1901.09847).

    It is divided by `divisor`, as the gradient is for the optimizer: the loss scale and the number of
    gradients in a sum may change from step to step.
    """

    lost: Tensor  # (R, n) bf16
    divisor: Tensor  # ()
    gaps: tuple[slice, ...]  # of all elements, those that belong to no parameter: nothing is owed of them


class Codec(NamedTuple):
    """Encodes gradients in a QuantFormat, or in Lloyd-Max codes of rotated blocks."""

    format: CodeFormat
    operations: Operations

    def encode(
        self,
        rows: Tensor,
        messages: Tensor,
        rotation: Rotation | None,
        first: int,
        feedback: Feedback | None = None,
    ) -> None:
        """Encode `rows` (R, n) into `messages` (G, bytes), each of R / G rows; with `feedback` of one row.

        `first` is the number of the first element (see Rotation). Rows that are rotated must be contiguous.
        With feedback block codes overwrite the rows, which must be fp32.
        """
        lost, divisor = (None, None) if feedback is None else (feedback.lost, feedback.divisor)
        if isinstance(self.format, LloydMaxFormat):
            assert rotation is not None
            signs = rotation.signs._replace(first=first)
            self.operations.quantize_rotated(
                rows.view(-1), messages, self.format, signs, lost=lost, divisor=divisor
            )
            return
        if lost is None or divisor is None:
            self.operations.quantize(rows, messages, self.format)
            return
        self.operations.quantize(rows.addcmul_(lost, divisor), messages, self.format)
        for row, message in zip(rows.neg_(), messages, strict=True):
            self.operations.sum_into(message[None], row, self.format, add=True)
        torch.div(rows, -divisor, out=lost)

    def sum_into(
        self, messages: Tensor, target: Tensor, rotation: Rotation | None, first: int, *, add: bool
    ) -> None:
        """Write the sum of `messages` (P, bytes), in their order, to `target` (m,) fp32, or add it.

        Decoded blocks are summed, and rotated back once.
        """
        if isinstance(self.format, QuantFormat):
            self.operations.sum_into(messages, target, self.format, add=add)
            return
        assert rotation is not None
        signs = rotation.signs._replace(first=first)
        self.operations.sum_rotated(messages, target, self.format, signs, add=add)

    def decode_each(self, messages: Tensor, target: Tensor, rotation: Rotation | None, first: int) -> None:
        """Write what each of `messages` (P, bytes) stands for to its part of `target` (P · n,) fp32."""
        for row, part in zip(messages, target.view(len(messages), -1), strict=True):
            self.sum_into(row[None], part, rotation, first, add=False)
            first += len(part)
        if rotation is not None:
            clear(target, rotation.gaps)
