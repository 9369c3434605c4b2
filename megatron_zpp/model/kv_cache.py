"""Keys and values of one layer for the tokens that generation has computed.

A row holds one text, whose token at position p has column p. Rows may have different lengths.

Shapes: R rows of this forward pass, T new tokens of each, C columns up to the longest row's end, G heads of
keys and values, H head width.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where the new tokens of a forward pass go, the same for all layers.

    `columns` (R, T) has the column of each token; None stands for the last T of the C columns in every row.
    """

    rows: slice
    end: int  # C
    row_numbers: Tensor | None = None  # (R, 1), of the rows counted from the first; comes with `columns`
    columns: Tensor | None = None


class LayerCache:
    """Storage that grows; `place` is set before each forward pass."""

    def __init__(self, like: Tensor, groups: int, head_width: int) -> None:
        # The order in which dot-product kernels read.
        self._keys, self._values = (like.new_empty((0, groups, 0, head_width)) for _ in range(2))
        self.place = Place(slice(0, 0), 0)

    def resize(self, rows: int, columns: int) -> None:
        """Change the storage; what lies inside both sizes stays."""
        _, _, now, _ = self._keys.shape
        more = (0, 0, 0, columns - now, 0, 0, 0, rows - len(self._keys))  # or less, below 0
        self._keys, self._values = F.pad(self._keys, more), F.pad(self._values, more)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (R, T, G, H) at `place`; return those of all columns, views (R, C, G, H)."""
        place, found = self.place, []
        for kept, new in ((self._keys, k), (self._values, v)):
            part = kept[place.rows]
            if place.columns is None:
                part[:, :, place.end - new.shape[1] : place.end] = new.transpose(1, 2)
            else:
                part[place.row_numbers, :, place.columns] = new
            found.append(part[:, :, : place.end].transpose(1, 2))
        return found[0], found[1]

    def move(self, source: int, target: int) -> None:
        """Replace a row by a copy of another."""
        for kept in (self._keys, self._values):
            kept[target] = kept[source]

    def clear(self, row: int, first: int = 0, end: int | None = None) -> None:
        """Zero columns of a row, because a masked column still takes part in products: NaN · 0 is NaN."""
        for kept in (self._keys, self._values):
            kept[row, :, first:end] = 0
