"""Where a data set is cut into train, valid and test."""

from collections.abc import Sequence
from itertools import pairwise


def cut(shares: Sequence[float], sequences: int) -> tuple[tuple[int, int], ...]:
    """The sequences [first, last) of each share, contiguous from 0 on.

    As Megatron-LM: each end is the running sum of the shares times `sequences`, rounded to the nearest whole
    number and halves to the even one. `shares` sum to 1, so the last end is `sequences`.
    """
    ends, total = [0], 0.0
    for share in shares:
        total += share
        ends.append(round(total * sequences))
    assert ends[-1] == sequences, f"shares {shares} sum to {total}, not 1"
    return tuple(pairwise(ends))
