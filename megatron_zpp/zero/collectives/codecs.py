"""How gradients become messages and sums: block codes, or rotated Lloyd-Max codes."""

from typing import Protocol

from torch import Tensor

from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.rotation import Rotation


class Codec(Protocol):
    """Encodes gradients of one kind of format. `first` is the number of the first element (see Rotation)."""

    def message_bytes(self, numel: int, rotation: Rotation | None) -> int:
        """Bytes of a message of so many elements."""

    def encode(self, rows: Tensor, messages: Tensor, rotation: Rotation | None, first: int) -> None:
        """Encode `rows` (R, n) into `messages` (G, bytes), each of R / G rows."""

    def sum_into(
        self, messages: Tensor, target: Tensor, rotation: Rotation | None, first: int, *, add: bool
    ) -> None:
        """Write the sum of `messages` (P, bytes), in their order, to `target` (m,) fp32, or add it."""


class BlockCodec:
    """The codes of a QuantFormat."""

    def __init__(self, format: QuantFormat, operations: Operations) -> None:
        self.format, self._operations = format, operations

    def message_bytes(self, numel: int, rotation: Rotation | None) -> int:
        """See Codec."""
        return self.format.message_bytes(numel)

    def encode(self, rows: Tensor, messages: Tensor, rotation: Rotation | None, first: int) -> None:
        """See Codec."""
        self._operations.quantize(rows, messages, self.format)

    def sum_into(
        self, messages: Tensor, target: Tensor, rotation: Rotation | None, first: int, *, add: bool
    ) -> None:
        """See Codec."""
        self._operations.sum_into(messages, target, self.format, add=add)


class RotatedCodec:
    """Codes of rotated blocks: the decoded blocks of all messages are summed, and rotated back once.

    The rotation of a unit has their format.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def message_bytes(self, numel: int, rotation: Rotation | None) -> int:
        """See Codec."""
        assert rotation is not None
        return rotation.format.message_bytes(numel)

    def encode(self, rows: Tensor, messages: Tensor, rotation: Rotation | None, first: int) -> None:
        """See Codec. The rows must be contiguous."""
        assert rotation is not None
        signs = rotation.signs_from(first)
        self._operations.quantize_rotated(rows.view(-1), messages, rotation.format, signs)

    def sum_into(
        self, messages: Tensor, target: Tensor, rotation: Rotation | None, first: int, *, add: bool
    ) -> None:
        """See Codec."""
        assert rotation is not None
        signs = rotation.signs_from(first)
        self._operations.sum_rotated(messages, target, rotation.format, signs, add=add)


def build_codec(format: QuantFormat | LloydMaxFormat, operations: Operations) -> Codec:
    """The codec of a format."""
    if isinstance(format, LloydMaxFormat):
        return RotatedCodec(operations)
    return BlockCodec(format, operations)
