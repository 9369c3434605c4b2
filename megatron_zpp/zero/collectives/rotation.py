"""What a reduction of rotated codes has to know of a unit."""

from dataclasses import dataclass, replace

from torch import Tensor

from megatron_zpp.ops.signs import Signs


@dataclass(frozen=True, eq=False)
class Rotation:
    """The random signs of a unit in one step, and where its gradient is zero.

    Every rank that sends or sums an element must give it the same sign, so elements have numbers that all
    ranks agree on. A rotation mixes the elements of a block. So what is decoded is not zero in the gaps of
    the layout, where it must be.
    """

    signs: Signs  # of the unit's element 0
    gaps: tuple[slice, ...]  # elements of this rank's shard that belong to no parameter

    def signs_from(self, element: int) -> Signs:
        """The signs of elements with the numbers from `element` on."""
        return replace(self.signs, first=element)

    def clear_gaps(self, shard: Tensor) -> None:
        """Set the gaps of this rank's shard of the sum to zero."""
        clear(shard, self.gaps)


def clear(flat: Tensor, gaps: tuple[slice, ...]) -> None:
    """Set these elements of `flat` (n,) to zero. There are few where sizes are multiples of a block."""
    for gap in gaps:
        flat[gap.start : gap.stop].zero_()
