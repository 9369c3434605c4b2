"""Random tokens in place of a data set, to measure speed without one."""

from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.samples import Epochs, Samples
from megatron_zpp.data.stateless_random import mix, random_bits


@dataclass(frozen=True)
class MockDataset(Samples):
    """Samples of uniform tokens, each a function of (seed, sample number)."""

    seq_length: int
    vocab_size: int
    seed: int

    windows_per_epoch = None

    def describe(self) -> str:
        return f"mock data: random tokens below {self.vocab_size:,}, samples of {self.seq_length}"

    def epochs(self, samples: int) -> list[Epochs]:
        return []

    def batch(self, indices: np.ndarray) -> np.ndarray:
        counters = random_bits(self.seed, np.asarray(indices, np.int64))[:, None]  # (len, 1)
        bits = mix(counters + np.arange(self.seq_length + 1, dtype=np.uint64))  # (len, S + 1)
        return (bits % np.uint64(self.vocab_size)).astype(np.int64)
