"""How gradients become messages and sums: block codes, or rotated Lloyd-Max codes."""

from typing import TypeAlias

from torch import Tensor

from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.rotation import Rotation
from megatron_zpp.zero.hop import CodeFormat


class BlockCodec:
    """Encodes gradients in a QuantFormat, which needs no rotation."""

    def __init__(self, format: QuantFormat, operations: Operations) -> None:
        self.format, self._operations = format, operations

    def encode(self, rows: Tensor, messages: Tensor, rotation: Rotation | None, first: int) -> None:
        """Encode `rows` (R, n) into `messages` (G, bytes), each of R / G rows.

        `first` is the number of the first element (see Rotation).
        """
        self._operations.quantize(rows, messages, self.format)

    def sum_into(
        self, messages: Tensor, target: Tensor, rotation: Rotation | None, first: int, *, add: bool
    ) -> None:
        """Write the sum of `messages` (P, bytes), in their order, to `target` (m,) fp32, or add it."""
        self._operations.sum_into(messages, target, self.format, add=add)


class RotatedCodec:
    """Codes of rotated blocks: the decoded blocks of all messages are summed, and rotated back once."""

    def __init__(self, format: LloydMaxFormat, operations: Operations) -> None:
        self.format, self._operations = format, operations

    def encode(self, rows: Tensor, messages: Tensor, rotation: Rotation | None, first: int) -> None:
        """See BlockCodec. The rows must be contiguous."""
        assert rotation is not None
        signs = rotation.signs_from(first)
        self._operations.quantize_rotated(rows.view(-1), messages, self.format, signs)

    def sum_into(
        self, messages: Tensor, target: Tensor, rotation: Rotation | None, first: int, *, add: bool
    ) -> None:
        """See BlockCodec."""
        assert rotation is not None
        signs = rotation.signs_from(first)
        self._operations.sum_rotated(messages, target, self.format, signs, add=add)


Codec: TypeAlias = BlockCodec | RotatedCodec


def build_codec(format: CodeFormat, operations: Operations) -> Codec:
    """The codec of a format."""
    if isinstance(format, LloydMaxFormat):
        return RotatedCodec(format, operations)
    return BlockCodec(format, operations)
