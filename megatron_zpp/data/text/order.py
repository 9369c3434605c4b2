"""The order in which an epoch reads the blocks of a text.

Blocks that can be read in any order are permuted (`GroupOrder`). Of text in shards, a few shards are read at
a time, each of them forward (`ShardOrder`).
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_zpp.data.stateless_random import permute, random_bits
from megatron_zpp.data.windows import WindowOrder

_BLOCKS, _WINDOWS, _STRETCHES = 0, 1, 2  # uses of random bits
_TOGETHER = 8  # stretches that are read at a time
_HELD = 2  # epochs whose order stays in memory, because reading ahead crosses from one to the next


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


@dataclass(frozen=True)
class ShardOrder(GroupOrder):
    """The stretches of [first, last) are permuted anew in each epoch, and read eight at a time.

    The blocks of eight stretches are interleaved in proportion to the lengths of the stretches, so that all
    eight end together. Consecutive blocks of this sequence form a group: a window of bounded size, in which
    samples are shuffled. Everything follows from the seed and the group's number.
    """

    stretches: np.ndarray = field(compare=False, kw_only=True)  # first block of each, and the end of the last
    _sequences: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def blocks(self, number: int) -> np.ndarray:
        epoch, group = divmod(number, self.groups)
        count = self.last - self.first
        if epoch not in self._sequences:
            while len(self._sequences) >= _HELD:
                del self._sequences[min(self._sequences)]
            self._sequences[epoch] = self._sequence(epoch)
        return self._sequences[epoch][count * group // self.groups : count * (group + 1) // self.groups]

    def _sequence(self, epoch: int) -> np.ndarray:
        """Return all blocks in the order of an epoch."""
        edges = np.clip(self.stretches, self.first, self.last)
        starts, lengths = edges[:-1], np.diff(edges)
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        visited = permute(np.arange(starts.size), starts.size, random_bits(self.seed, epoch, _STRETCHES))
        starts, lengths = starts[visited], lengths[visited]
        turn = np.repeat(np.arange(starts.size), lengths)
        within = np.arange(turn.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        progress = (2 * within + 1) / (2 * lengths[turn])
        order = np.lexsort((turn, progress, turn // _TOGETHER))
        return (starts[turn] + within)[order]
