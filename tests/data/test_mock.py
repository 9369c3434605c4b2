"""Mock tokens: a function of seed and sample, spread over the vocabulary."""

import numpy as np

from megatron_zpp.data.mock import MockDataset


def test_samples_depend_on_their_number_and_seed_alone():
    data = MockDataset(16, 50_257, 1)
    together = data.batch(np.arange(100))
    assert together.shape == (100, 17)
    assert together.dtype == np.int64
    assert data.batch(np.array([7, 3])).tolist() == together[[7, 3]].tolist()
    assert len({tuple(row) for row in together.tolist()}) == 100
    assert (MockDataset(16, 50_257, 2).batch(np.arange(100)) == together).mean() < 0.01
