"""Random bits and permutations as pure functions of integers: vectorised, with neither state nor tables.

A permutation of range(n) is a Feistel network over a grid of a × b cells, a = ceil(sqrt(n)) and b = ceil(n /
a). A number is a row and a column, and each round shifts one of them by a hash of the other. A result outside
range(n) is permuted again until it lies inside (generalised Feistel and cycle walking: Black and Rogaway,
'Ciphers with arbitrary finite domains', 2002). This is rare, because the grid exceeds n by fewer than a
cells.
"""

import math

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads small integers over all bits
# Few rounds suffice for many rows and columns; a grid of few cells mixes slowly.
_ROUNDS, _ROUNDS_OF_SMALL, _SMALL = 8, 24, 4096


def mix(values: np.ndarray) -> np.ndarray:
    """Apply a fixed bijection to a uint64 array; every input bit affects all output bits (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def random_bits(*words: int | np.ndarray) -> np.ndarray:
    """Return 64 random bits per tuple of words, as uint64; integers and integer arrays broadcast together."""
    bits = np.zeros(1, np.uint64)  # an array, because numpy warns when a scalar wraps around
    for word in words:
        if isinstance(word, int):
            values = np.array(word & 0xFFFFFFFFFFFFFFFF, np.uint64)
        else:
            values = word.astype(np.uint64)
        bits = mix((bits ^ values) + GOLDEN)
    return bits


def permute(indices: np.ndarray, n: int, key: int | np.ndarray) -> np.ndarray:
    """Return the images of `indices` under the permutation of range(n) that `key` selects.

    indices: (len,) integers in [0, n), 1 <= n <= 2^62. key: 64 bits, one for all indices or (len,) uint64.
    Returns (len,) int64.
    """
    assert 1 <= n <= 1 << 62, f"n must be 1 to 2^62, got {n}"
    values = np.asarray(indices).astype(np.uint64)
    assert not values.size or int(values.max()) < n, f"indices must be below {n}, got {values.max()}"
    keys = np.broadcast_to(random_bits(key), values.shape)  # hashed, so that keys 1 and 2 are unrelated
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    values = _feistel(values, keys, rows, columns)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _feistel(values[outside], keys[outside], rows, columns)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Permute (len,) uint64 below rows · columns."""
    rounds = _ROUNDS_OF_SMALL if rows * columns < _SMALL else _ROUNDS
    height, width, one = np.uint64(rows), np.uint64(columns), np.uint64(1)
    row, column = np.divmod(values, width)
    for _ in range(0, rounds, 2):
        row = (row + (mix(column + keys) >> one)) % height  # 63 bits, so that the sum fits in 64
        keys = keys + GOLDEN
        column = (column + (mix(row + keys) >> one)) % width
        keys = keys + GOLDEN
    return row * width + column
