"""The format of a quantised message: codes, their block scales, and how many bytes that is."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Codes = Literal["int8", "int4", "fp8"]
BITS = {"int8": 8, "int4": 4, "fp8": 8}
SCALES = (torch.bfloat16, torch.float32)
SMALLEST_BLOCK, LARGEST_BLOCK = 32, 2048
ALIGNMENT = 16  # bytes: what a kernel loads at once, and so where the next message may begin


@dataclass(frozen=True)
class QuantFormat:
    """How a run of numbers becomes a message: codes, then one scale a block, then zero padding.

    `codes`: two's complement `int8` or `int4` (two in a byte, the first in the low half), or `fp8`, which is
    E4M3 of FP8 Formats for Deep Learning (2209.05433). `block`: elements that share a scale, a power of two
    from 32 to 2048. `scales`: torch.bfloat16 or torch.float32. `rotate`: each 32 elements go through a
    Hadamard matrix first, which spreads an outlier over all of them. Raises ValueError where one is none of
    these.
    """

    codes: Codes = "int8"
    block: int = 256
    scales: torch.dtype = torch.bfloat16
    rotate: bool = False

    def __post_init__(self) -> None:
        if self.codes not in get_args(Codes):
            raise ValueError(f"codes must be int8, int4 or fp8, got {self.codes}")
        if not is_block(self.block):
            raise ValueError(
                f"block must be a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}, got {self.block}"
            )
        if self.scales not in SCALES:
            raise ValueError(f"scales must be torch.bfloat16 or torch.float32, got {self.scales}")

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return BITS[self.codes]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's codes and its scale."""
        return self.block * self.bits // 8 + self.scales.itemsize

    def message_bytes(self, numel: int) -> int:
        """Bytes of the message of `numel` elements. Raises ValueError unless they are whole blocks."""
        if numel < 0 or numel % self.block:
            raise ValueError(f"a message holds whole blocks of {self.block} elements, got {numel} elements")
        return -(-numel // self.block * self.block_bytes // ALIGNMENT) * ALIGNMENT

    def message_numel(self, message_bytes: int) -> int:
        """Elements of a message, from its size. Raises ValueError where no message has that size.

        A block's bytes are more than the padding can be, so no two numbers of blocks share a size.
        """
        numel = message_bytes // self.block_bytes * self.block
        if message_bytes < 0 or self.message_bytes(numel) != message_bytes:
            raise ValueError(
                f"no message of {self.codes} in blocks of {self.block} has {message_bytes} bytes"
            )
        return numel


def is_block(block: int) -> bool:
    """Whether `block` is a power of two in the range that the kernels take."""
    return SMALLEST_BLOCK <= block <= LARGEST_BLOCK and block & (block - 1) == 0
