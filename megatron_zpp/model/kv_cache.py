"""Keys and values of one layer for the tokens that generation has computed.

A row holds one text, whose token at position p has column p. Rows may have different lengths.

Shapes: R rows, T new tokens of each, C columns up to the longest row's end, G heads of keys and values, H
head width.
"""

from collections.abc import Sequence

from torch import Tensor


class LayerCache:
    """Storage of `shape` (rows, G, columns, H).

    Before each forward pass it is told where the new tokens go, the same for all layers: `end` is C. `index`
    has the row (R, 1) and the column (R, T) of each token; None stands for the last T of the C columns in
    every row.
    """

    def __init__(self, like: Tensor, shape: tuple[int, int, int, int]) -> None:
        # The order in which dot-product kernels read.
        self._keys, self._values = (like.new_zeros(shape) for _ in range(2))
        self.end = 0
        self.index: tuple[Tensor, Tensor] | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (R, T, G, H) there; return those of all columns, views (R, C, G, H)."""
        end, index = self.end, self.index
        for kept, new in ((self._keys, k), (self._values, v)):
            if index is None:
                kept[:, :, end - new.shape[1] : end] = new.transpose(1, 2)
            else:
                kept[index[0], :, index[1]] = new
        return self._keys[:, :, :end].transpose(1, 2), self._values[:, :, :end].transpose(1, 2)

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these."""
        self._keys, self._values = self._keys[rows], self._values[rows]

    def clear(self, row: int, first: int, end: int) -> None:
        """Zero columns of a row, because a masked column still takes part in products: NaN · 0 is NaN."""
        for kept in (self._keys, self._values):
            kept[row, :, first:end] = 0
