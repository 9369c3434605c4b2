"""Where each parameter of a unit lies in its flat buffer, and which rank owns what: arithmetic on values."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

ALIGNMENT = 128  # elements, at least: views start at 256 bytes even in 16-bit formats, for matrix kernels
SHARD_MULTIPLE = 256  # elements: a shard holds whole quantisation blocks of this size and smaller


class ParameterSlice(NamedTuple):
    """`length` elements: of a parameter from `start` on, and of a range of its unit from `destination` on."""

    parameter: int
    start: int
    destination: int
    length: int


@dataclass(frozen=True)
class FlatLayout:
    """Parameters of `numels` elements one after the other, cut into `ranks` equal shards.

    The first `decayed` parameters have weight decay and the others have none, so both are contiguous. Every
    parameter starts at a multiple of `alignment`. If that is the largest quantisation block, no block holds
    elements of two parameters, whose magnitudes may differ. The end is padded, so that any sizes fit any
    number of ranks. Gaps are zero and stay zero.
    """

    numels: tuple[int, ...]
    decayed: int
    ranks: int
    multiple: int = SHARD_MULTIPLE  # of a shard's elements
    alignment: int = ALIGNMENT  # of a parameter's first element

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each parameter, and the end of the last one."""
        return tuple(accumulate((_round_up(numel, self.alignment) for numel in self.numels), initial=0))

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return _round_up(-(-self.offsets[-1] // self.ranks), self.multiple)

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, gaps and padding included."""
        return self.shard_numel * self.ranks

    def shard(self, index: int) -> range:
        """The elements of the buffer in a shard; `Topology.shard_of` says whose it is."""
        return range(index * self.shard_numel, (index + 1) * self.shard_numel)

    def decayed_in(self, owned: range) -> int:
        """How many of the `owned` elements, its first ones, have weight decay."""
        return min(max(self.offsets[self.decayed] - owned.start, 0), len(owned))

    def gaps(self) -> Iterator[range]:
        """The elements between and behind the parameters."""
        for index, numel in enumerate(self.numels):
            stop = self.numel if index + 1 == len(self.numels) else self.offsets[index + 1]
            if self.offsets[index] + numel < stop:
                yield range(self.offsets[index] + numel, stop)

    def gaps_in(self, elements: range) -> Iterator[range]:
        """The parts of `gaps` in a range of the buffer, counted from its first element."""
        for gap in self.gaps():
            start, stop = max(gap.start, elements.start), min(gap.stop, elements.stop)
            if start < stop:
                yield range(start - elements.start, stop - elements.start)

    def parameter_slices(self, owned: range) -> Iterator[ParameterSlice]:
        """The parts of parameters that the `owned` elements hold."""
        for index, numel in enumerate(self.numels):
            start = max(self.offsets[index], owned.start)
            stop = min(self.offsets[index] + numel, owned.stop)
            if start < stop:
                yield ParameterSlice(index, start - self.offsets[index], start - owned.start, stop - start)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
