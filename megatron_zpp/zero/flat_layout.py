"""Where each parameter of a unit lies in the unit's flat buffer: arithmetic without tensors."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

ALIGNMENT = 128  # elements: views start at 256 bytes even in 16-bit formats, as matrix kernels like it


@dataclass(frozen=True)
class FlatLayout:
    """Parameters of `numels` elements one after the other, each start aligned; the gaps are zero."""

    numels: tuple[int, ...]
    alignment: int = ALIGNMENT

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each parameter."""
        return tuple(accumulate((self._padded(numel) for numel in self.numels), initial=0))[:-1]

    @cached_property
    def numel(self) -> int:
        """Elements of the whole buffer, gaps included."""
        return sum(self._padded(numel) for numel in self.numels)

    def _padded(self, numel: int) -> int:
        return -(-numel // self.alignment) * self.alignment
