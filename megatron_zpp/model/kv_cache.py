"""Keys and values of one layer for the columns that generation has computed.

Shapes: B rows, T new columns, C all columns until now, G heads of keys and values, H head width.
"""

from collections.abc import Sequence

from torch import Tensor


class LayerCache:
    """Storage for `columns` columns, filled from the left."""

    def __init__(self, like: Tensor, rows: int, columns: int, groups: int, head_width: int) -> None:
        shape = (rows, groups, columns, head_width)  # the order in which dot-product kernels read
        self._keys, self._values = like.new_empty(shape), like.new_empty(shape)
        self._length = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values (B, T, G, H); return those of all columns, views (B, C, G, H)."""
        first, self._length = self._length, self._length + k.shape[1]
        found = []
        for kept, new in ((self._keys, k), (self._values, v)):
            kept[:, :, first : self._length] = new.transpose(1, 2)
            found.append(kept[:, :, : self._length].transpose(1, 2))
        return found[0], found[1]

    def keep(self, rows: Sequence[int] | Tensor) -> None:
        """Forget all rows but these."""
        self._keys, self._values = self._keys[rows], self._values[rows]
