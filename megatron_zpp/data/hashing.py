"""Random bits as a pure function of integers, vectorised."""

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads small integers over all bits


def mix(values: np.ndarray) -> np.ndarray:
    """A fixed bijection of uint64 arrays, after which any change has spread over all bits (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def random_bits(*words: int | np.ndarray) -> np.ndarray:
    """64 random bits for each tuple of words, as uint64; integers and integer arrays broadcast together."""
    bits = np.zeros(1, np.uint64)  # an array, since numpy warns when a scalar wraps around
    for word in words:
        if isinstance(word, int):
            word = np.uint64(word & 0xFFFFFFFFFFFFFFFF)
        bits = mix((bits ^ word.astype(np.uint64)) + GOLDEN)
    return bits
