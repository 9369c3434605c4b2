"""Blends: the documented bound, and the samples of each data set in sequence."""

import math
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.blend import Blend, BlendedDataset
from megatron_zpp.data.mock import MockDataset

weights_lists = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=17)


@settings(max_examples=100)
@given(weights_lists, st.sampled_from([0, 1, 999]) | st.integers(0, 2**40 - 1000))
def test_each_set_is_one_sequence_within_the_bound(weights, begin):
    """The number of a sample is the count of its data set so far, so the bound applies to it as well."""
    blend = Blend(tuple(weights))
    which, numbers = blend.locate(np.arange(begin, begin + 1000))
    bound = math.ceil(math.log2(len(weights))) / 2 + 1e-6
    before = blend.counts(begin)
    assert (blend.counts(begin + 777) - before).tolist() == np.bincount(
        which[:777], minlength=len(weights)
    ).tolist()
    for source, weight in enumerate(weights):
        mine = np.flatnonzero(which == source)
        assert numbers[mine].tolist() == list(range(before[source], before[source] + len(mine)))
        share = Fraction(weight) / sum(map(Fraction, weights))
        for position in mine[[0, -1]].tolist() if mine.size else ():
            assert abs(int(numbers[position]) - (begin + position) * share) <= bound


def test_by_hand():
    which, numbers = Blend((3.0, 1.0)).locate(np.arange(8))
    # floor(0.75 j + 0.5) for j = 0 … 8: 0 1 2 2 3 4 5 5 6
    assert which.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert numbers.tolist() == [0, 1, 0, 2, 3, 4, 1, 5]


def test_extreme_weights():
    which, _ = Blend((1e-300, 1e300)).locate(np.arange(100))
    assert which.tolist() == [1] * 100


def test_rows_are_the_sources_own():
    sources = tuple(MockDataset(8, 1000, seed) for seed in range(3))
    data = BlendedDataset(sources, Blend((0.5, 0.2, 0.3)))
    for indices in (np.array([5]), np.random.default_rng(0).permutation(100)[:7]):
        parts = zip(*data.blend.locate(indices), strict=True)
        expected = [sources[source].batch(np.array([number]))[0].tolist() for source, number in parts]
        assert data.batch(indices).tolist() == expected
