"""A keyed permutation of range(n) that is evaluated per index: no table, no state.

A Feistel network over a grid of a × b cells, a = ceil(sqrt(n)) and b = ceil(n / a): a number is a row and a
column, and each round shifts one of them by a hash of the other. A result outside range(n) is fed through
again until it falls inside (Black and Rogaway, 'Ciphers with arbitrary finite domains', 2002: generalised
Feistel and cycle walking). The grid has fewer than a cells too many, so that is rare.
"""

import math

import numpy as np

from megatron_zpp.data.hashing import GOLDEN, mix, random_bits

# Four are enough where rows and columns are many; a handful of cells mixes slowly.
_ROUNDS, _ROUNDS_OF_FEW, _FEW = 8, 24, 4096


def permute(indices: np.ndarray, n: int, key: int | np.ndarray) -> np.ndarray:
    """Where the permutation of range(n) chosen by `key` sends `indices`.

    indices: (len,) integers in [0, n), 1 <= n <= 2^62. key: 64 bits, one for all or (len,) uint64.
    Returns (len,) int64.
    """
    assert 1 <= n <= 1 << 62, f"n is 1 to 2^62, not {n}"
    values = np.asarray(indices).astype(np.uint64)
    assert values.ndim == 1, f"indices are one-dimensional, not {values.shape}"
    assert not values.size or int(values.max()) < n, f"indices are below {n}, not {values.max()}"
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
    """(len,) uint64 below rows · columns to the same."""
    rounds = _ROUNDS_OF_FEW if rows * columns < _FEW else _ROUNDS
    rows, columns, one = np.uint64(rows), np.uint64(columns), np.uint64(1)
    row, column = np.divmod(values, columns)
    for _ in range(0, rounds, 2):
        row = (row + (mix(column + keys) >> one)) % rows  # 63 bits, so that the sum fits 64
        keys = keys + GOLDEN
        column = (column + (mix(row + keys) >> one)) % columns
        keys = keys + GOLDEN
    return row * columns + column
