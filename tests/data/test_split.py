"""Splits compared with exact arithmetic on fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.config.data import split_shares
from megatron_zpp.data.split import cut


def nearest(value):
    """Round half to even, on an exact fraction."""
    below, rest = divmod(value, 1)
    return int(below) + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(0, 10**8))
def test_ends_are_the_rounded_running_shares(numbers, sequences):
    shares = split_shares(",".join(map(str, numbers)))
    padded = [*numbers, 0, 0][:3]
    exact = [Fraction(sum(padded[:count]) * sequences, sum(padded)) for count in range(4)]
    pieces = cut(shares, sequences)
    ends = [0, *(last for _, last in pieces)]
    assert [first for first, _ in pieces] == ends[:-1]
    assert (ends[0], ends[-1]) == (0, sequences)
    for end, value in zip(ends, exact, strict=True):
        tie = abs(value % 1 - Fraction(1, 2)) < Fraction(1, 10**6)  # where a float may fall to either side
        assert abs(end - value) <= Fraction(1, 2) + Fraction(1, 10**6) if tie else end == nearest(value)


@pytest.mark.parametrize(
    ("split", "sequences", "ends"),
    [
        ("969,30,1", 1000, (969, 999, 1000)),
        ("1,1", 5, (2, 5, 5)),  # 2.5 goes to the even 2
        ("1,1", 7, (4, 7, 7)),  # 3.5 to 4
        ("0,0,2", 7, (0, 0, 7)),
    ],
)
def test_by_hand(split, sequences, ends):
    assert tuple(last for _, last in cut(split_shares(split), sequences)) == ends
