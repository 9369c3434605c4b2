"""Python interface of csrc/orders.cc; without a compiler, slower numpy code takes its place."""

import ctypes
import os
from collections.abc import Callable, Iterator

import numpy as np

from megatron_zpp.native.cache import BuildError
from megatron_zpp.native.library import load_source
from megatron_zpp.native.sources import csrc

SOURCE = csrc() / "orders.cc"
_LANES = 16  # as in orders.cc
_ALIGNED = 32  # bytes
_PIECE = 1 << 17  # rows of a sample index that are filled at a time, and stay in the processor's cache


class CompiledOrders:
    """Each method returns bit for bit what its numpy counterpart in order.py or blend.py returns."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.sample_rows.restype = ctypes.c_int64

    def shuffle(self, values: np.ndarray, random: np.random.RandomState) -> None:
        """Do random.shuffle on contiguous elements of 4 or 8 bytes."""
        assert values.flags.c_contiguous, "elements must be contiguous"
        assert values.itemsize in (4, 8), f"elements must have 4 or 8 bytes, got {values.itemsize}"
        state = random.get_state(legacy=False)
        generator = state["state"]
        key, position = np.array(generator["key"], np.uint32), np.array([generator["pos"]], np.int32)
        self._library.shuffle_values(
            _address(values), _int(values.itemsize), _int(values.size), _address(key), _address(position)
        )
        random.set_state({**state, "state": {"key": key, "pos": int(position[0])}})

    def sample_rows(
        self, lengths: np.ndarray, documents: np.ndarray, seq_length: int, rows: int, dtype: np.dtype
    ) -> Iterator[np.ndarray]:
        """Yield a sample index (rows, 2) in pieces, in one reused buffer; ends early with the documents."""
        lengths, documents = (np.ascontiguousarray(array, np.int32) for array in (lengths, documents))
        piece, position = np.empty((_PIECE, 2), dtype), np.zeros(3, np.int64)
        done = 0
        while done < rows:
            filled = self._library.sample_rows(
                _address(piece),
                _int(dtype.itemsize),
                _int(min(rows - done, _PIECE)),
                _address(lengths),
                _address(documents),
                _int(documents.size),
                _int(seq_length),
                _address(position),
            )
            if not filled:
                return
            if not done:
                piece[0] = 0
            done += filled
            yield piece[:filled]

    def choose(
        self,
        weights: np.ndarray,
        firsts: np.ndarray,
        counts: np.ndarray,
        rows: np.ndarray,
        which: np.ndarray,
        numbers: np.ndarray,
    ) -> None:
        """Write the choices of a blend by lanes: lane k begins at sample firsts[k] and fills row rows[k].

        weights (K,) float64; counts (K, lanes) float64, updated in place; which (…, steps) int16; numbers
        (…, steps) int32 or int64.
        """
        lanes, steps = len(rows), which.shape[1]
        weights = np.ascontiguousarray(weights, np.float64)
        unused_which, unused_numbers = np.empty(steps, which.dtype), np.empty(steps, numbers.dtype)
        for first in range(0, lanes, _LANES):
            here = min(_LANES, lanes - first)
            inner = _aligned(len(weights), _LANES)
            inner[:, :here], inner[:, here:] = counts[:, first : first + here], 0
            begins = np.zeros(_LANES, np.int64)
            begins[:here] = firsts[first : first + here]
            outputs = [
                (ctypes.c_void_p * _LANES)(
                    *(
                        array[rows[first + lane]].ctypes.data if lane < here else unused.ctypes.data
                        for lane in range(_LANES)
                    )
                )
                for array, unused in ((which, unused_which), (numbers, unused_numbers))
            ]
            self._library.draw_samples(
                _address(weights),
                _address(inner),
                _int(len(weights)),
                _address(begins),
                _int(steps),
                *outputs,
                _int(numbers.itemsize),
            )
            counts[:, first : first + here] = inner[:, :here]


def compiled_orders(say: Callable[[str], None]) -> CompiledOrders | None:
    """Return the library; if it cannot be built, None, after a warning with the reason."""
    try:
        return CompiledOrders(load_source(SOURCE, say, os.environ))
    except (BuildError, OSError) as error:
        say(f"warning: orders are built by numpy, which takes longer: {str(error).splitlines()[0]}")
        return None


def _aligned(*shape: int) -> np.ndarray:
    size = int(np.prod(shape)) * 8
    raw = np.empty(size + _ALIGNED, np.uint8)
    begin = -raw.ctypes.data % _ALIGNED
    return raw[begin : begin + size].view(np.float64).reshape(shape)


_int = ctypes.c_int64


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
