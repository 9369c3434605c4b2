"""Checks that the arrays of an index agree with one another, in constant memory."""

import numpy as np

from megatron_zpp.data.file_array import FileArray

_CHUNK = 1 << 20  # entries
Rows = np.ndarray | FileArray


def check_lengths_and_pointers(
    path: str, lengths: Rows, pointers: Rows, itemsize: int, lengths_at: int, pointers_at: int
) -> int:
    """Return the number of tokens.

    lengths (S,) int32 and pointers (S,) int64 begin at bytes `lengths_at` and `pointers_at` of the file.
    Raises ValueError for a negative length, and for a pointer that differs from the size of all sequences
    before it.
    """
    position = 0  # bytes of .bin
    for first in range(0, lengths.size, _CHUNK):
        chunk = lengths[first : first + _CHUNK].astype(np.int64)
        if chunk.min() < 0:
            at = int(np.argmax(chunk < 0))
            raise ValueError(
                f"{path}: byte {lengths_at + 4 * (first + at)}: sequence {first + at} has length "
                f"{chunk[at]}; lengths must be 0 or more"
            )
        ends = position + np.cumsum(chunk) * itemsize
        expected = ends - chunk * itemsize
        found = pointers[first : first + _CHUNK]
        if not np.array_equal(found, expected):
            at = int(np.argmax(found != expected))
            raise ValueError(
                f"{path}: byte {pointers_at + 8 * (first + at)}: sequence {first + at} points at byte "
                f"{found[at]} of the .bin; the lengths before it end at byte {expected[at]}"
            )
        position = int(ends[-1])
    return position // itemsize


def check_document_indices(path: str, indices: Rows, sequences: int, indices_at: int) -> None:
    """Raise ValueError unless indices (D,) int64, at byte `indices_at`, rise from 0 to `sequences`."""
    if not indices.size:
        raise ValueError(f"{path}: byte 26: 0 document indices; the first one, 0, is missing")
    if indices[0] != 0:
        raise ValueError(f"{path}: byte {indices_at}: document 0 begins at sequence {indices[0]}, not 0")
    for first in range(0, indices.size - 1, _CHUNK):
        chunk = indices[first : first + _CHUNK + 1]
        falls = chunk[1:] < chunk[:-1]
        if falls.any():
            at = first + int(np.argmax(falls)) + 1
            raise ValueError(
                f"{path}: byte {indices_at + 8 * at}: document index {at} is {indices[at]}, below the "
                f"{indices[at - 1]} before it"
            )
    if indices[-1] != sequences:
        at = indices_at + 8 * (indices.size - 1)
        raise ValueError(
            f"{path}: byte {at}: the last document ends at sequence {indices[-1]}; there are {sequences}"
        )
