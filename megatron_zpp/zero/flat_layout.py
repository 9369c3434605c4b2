"""Where each parameter of a unit lies in its flat buffer, and which rank owns what: arithmetic on values."""

import math
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

    The first `coded` parameters are gathered as codes, a byte each. Then every element of the buffer stands
    for a byte of what is gathered. The other parameters of the unit, the wide ones, take two bytes each, so
    the buffer has a gap behind them that is as long as they are. No shard boundary divides the two, so that
    one rank has both bytes of each wide parameter:

        elements of the buffer        codes   codes | codes   gap   wide   gap |
        bytes of what is gathered     codes   codes | codes   gap   wide       |
                                            shard 0 |                  shard 1 |
    """

    numels: tuple[int, ...]
    decayed: int
    ranks: int
    alignment: int = ALIGNMENT  # of a parameter's first element
    coded: int = 0  # of the parameters
    frozen: bool = False  # whether the parameters are not trained

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each parameter, and the end of the last one."""
        aligned = [_round_up(numel, self.alignment) for numel in self.numels]
        if not self.coded:
            return tuple(accumulate(aligned, initial=0))
        codes = tuple(accumulate(aligned[: self.coded], initial=0))
        return (*codes[:-1], *accumulate(aligned[self.coded :], initial=self.wide.start))

    @cached_property
    def wide(self) -> range:
        """The elements from the first wide parameter on, up to the gap behind them; empty without codes."""
        if not self.coded:
            return range(0)
        codes, wide = self._codes_and_wide
        start = codes
        if wide and codes // self.shard_numel != (codes + 2 * wide - 1) // self.shard_numel:
            start = _round_up(codes, self.shard_numel)
        return range(start, start + wide)

    def wide_in(self, owned: range) -> range:
        """The same, counted from the first of the `owned` elements; empty if they are another rank's."""
        if not self.wide or self.wide.start not in owned:
            return range(0)
        return range(self.wide.start - owned.start, self.wide.stop - owned.start)

    @property
    def _codes_and_wide(self) -> tuple[int, int]:
        """The elements of parameters that are coded, and of those that are not; gaps between them count."""
        aligned = [_round_up(numel, self.alignment) for numel in self.numels]
        return sum(aligned[: self.coded]), sum(aligned[self.coded :])

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        if not self.coded:
            return _round_up(-(-self.offsets[-1] // self.ranks), SHARD_MULTIPLE)
        codes, wide = self._codes_and_wide
        least = max(-(-(codes + 2 * wide) // self.ranks), 2 * wide)
        return _round_up(least, math.lcm(SHARD_MULTIPLE, self.alignment))  # a shard may begin with `wide`

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
