"""Refuses a token that the vocabulary does not have, and says where it stands."""

from collections.abc import Callable

import numpy as np

from megatron_zpp.data.indexed import IndexedDataset, tokens_path


def check_tokens(
    batch: np.ndarray, vocab_size: int, source: IndexedDataset, place: Callable[[int, int], int]
) -> None:
    """Raises ValueError unless all of `batch` (len, S + 1) is in [0, vocab_size).

    `place` (row, column) is the number of that token in `source`.
    """
    if not batch.size or (batch.min() >= 0 and batch.max() < vocab_size):
        return
    row, column = np.argwhere((batch < 0) | (batch >= vocab_size))[0].tolist()
    position = place(row, column)
    raise ValueError(
        f"{tokens_path(source.prefix)}: byte {position * source.dtype.itemsize}: token {position} is "
        f"{batch[row, column]}, outside the vocabulary of {vocab_size}; give the tokenizer that made the "
        "data set"
    )
