"""Permutations of every size: each index once, and in the order that runs rely on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.stateless_random import permute, random_bits


def test_bits_of_one_word_are_what_splitmix64_draws_first():
    """Published for the seeds 0 and 1234567. Other bits would change the order of the data of every run."""
    assert [int(random_bits(seed)[0]) for seed in (0, 1234567)] == [0xE220A8397B1DCDAF, 6457827717110365317]


def test_permutations_are_those_by_which_runs_have_begun():
    """Of few cells, which get more rounds, and of many."""
    assert permute(np.arange(8), 8, 3).tolist() == [0, 4, 7, 1, 3, 2, 5, 6]
    assert permute(np.array([0, 1, 999_999]), 10**6, 3).tolist() == [857191, 832747, 346076]
    assert permute(np.array([0, 2**62 - 1]), 2**62, 3).tolist() == [4038132879109890495, 2577741944704970979]


@settings(max_examples=150)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_each_index_once(n, key):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@pytest.mark.parametrize("n", [2**31 + 1, 2**32, 10**12 + 39, 2**53 + 1, 2**62 - 1, 2**62])
def test_large_ranges_stay_in_range_without_collisions(n):
    edges = np.concatenate([np.arange(1000), np.arange(n - 1000, n), n // 2 + np.arange(1000)])
    images = permute(edges, n, 9)
    assert images.min() >= 0
    assert int(images.max()) < n
    assert len(set(images.tolist())) == 3000


def test_subsets_and_order_of_the_indices_do_not_matter():
    whole = permute(np.arange(1000), 1000, 3)
    some = np.array([999, 0, 500, 500])
    assert permute(some, 1000, 3).tolist() == whole[some].tolist()
    assert permute(np.arange(0), 1000, 3).tolist() == []


def test_a_key_for_each_index():
    keys = np.array([1, 2, 3, 2**64 - 1], np.uint64)
    together = permute(np.array([4, 4, 4, 4]), 10**9, keys)
    assert together.tolist() == [int(permute(np.array([4]), 10**9, int(key))[0]) for key in keys]
    assert len(set(together.tolist())) == 4
