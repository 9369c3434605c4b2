"""The formats of quantised messages: codes, the scales of their blocks, and the number of bytes."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

CodeType = Literal["int8", "int4"]
BITS = {"int8": 8, "int4": 4}
SMALLEST_BLOCK, LARGEST_BLOCK = 32, 2048
SCALE_BYTES = 2  # bf16
SQUARES_BLOCK = 256  # elements per sum of squares
ALIGNMENT = 16  # bytes that a kernel loads at once; every message begins at a multiple of it


class BlockFormat:
    """How a run of numbers becomes a message: all codes, then one bf16 scale per block, then zero padding.

    `block`: elements that share a scale, a power of two from 32 to 2048; ValueError for any other value.
    """

    block: int

    def __post_init__(self) -> None:
        whole = SMALLEST_BLOCK <= self.block <= LARGEST_BLOCK
        if not whole or self.block & (self.block - 1):
            raise ValueError(
                f"block must be a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}, got {self.block}"
            )

    @property
    def bits(self) -> int:
        """Bits per code."""
        raise NotImplementedError

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes and the scale of one block."""
        return self.block * self.bits // 8 + SCALE_BYTES

    @property
    def bytes_per_element(self) -> float:
        """Codes and scales, without the padding of the message."""
        return self.block_bytes / self.block

    def message_bytes(self, numel: int) -> int:
        """Bytes of the message of `numel` elements. Raises ValueError unless they are whole blocks."""
        if numel < 0 or numel % self.block:
            raise ValueError(f"a message holds whole blocks of {self.block} elements, got {numel} elements")
        return -(-numel // self.block * self.block_bytes // ALIGNMENT) * ALIGNMENT

    def numel_of(self, messages: Tensor) -> int:
        """Return m of messages (P, message_bytes(m)): unique, as a block has more bytes than the padding."""
        return messages.shape[1] // self.block_bytes * self.block

    def parts_of(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of a message of `numel` elements: codes (K, bytes per block), scales (K, 2), the padding."""
        blocks, codes = numel // self.block, numel * self.bits // 8
        used = blocks * self.block_bytes
        return (
            message[:codes].view(blocks, self.block * self.bits // 8),
            message[codes:used].view(blocks, SCALE_BYTES),
            message[used:],
        )


@dataclass(frozen=True)
class QuantFormat(BlockFormat):
    """Integer codes, two's complement `int8` or `int4` (two per byte, the first in the low half)."""

    code_type: CodeType = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        if self.code_type not in BITS:
            raise ValueError(f"code_type must be int8 or int4, got {self.code_type}")
        super().__post_init__()

    @property
    def bits(self) -> int:
        return BITS[self.code_type]


@dataclass(frozen=True)
class LloydMaxFormat(BlockFormat):
    """Lloyd-Max codes of 2 or 4 bits. Within a byte the first element has the lowest bits."""

    bits: int = 4
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ValueError(f"bits must be 2 or 4, got {self.bits}")
        super().__post_init__()
