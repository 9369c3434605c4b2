"""The order in which an epoch reads the blocks of a text that can be read in any order."""

from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.stateless_random import permute, random_bits
from megatron_zpp.data.windows import WindowOrder

_BLOCKS, _WINDOWS = 0, 1  # uses of random bits


@dataclass(frozen=True)
class GroupOrder:
    """The blocks of [first, last) in each group, with groups numbered through all epochs: arithmetic only."""

    first: int
    last: int
    group: int  # blocks per group, or more
    seed: int

    @property
    def groups(self) -> int:
        """Groups per epoch."""
        return max(1, (self.last - self.first) // self.group)

    def blocks(self, number: int) -> np.ndarray:
        """Return the blocks of a group, in the order in which their tokens are concatenated."""
        epoch, group = divmod(number, self.groups)
        count = self.last - self.first
        edges = [count * edge // self.groups for edge in (group, group + 1)]
        return self.first + permute(np.arange(*edges), count, random_bits(self.seed, epoch, _BLOCKS))

    def windows(self, number: int, tokens: int, seq_length: int) -> WindowOrder:
        """Return the order of the windows of a group with `tokens` tokens, more than `seq_length`."""
        return WindowOrder(tokens, seq_length, int(random_bits(self.seed, number, _WINDOWS)[0]))
