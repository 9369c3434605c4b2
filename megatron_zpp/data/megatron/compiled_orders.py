"""The Python face of csrc/orders.cc, which numpy replaces, more slowly, where there is no compiler."""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron_zpp.native.cache import BuildError
from megatron_zpp.native.library import load_source

SOURCE = Path(__file__).resolve().parents[3] / "csrc" / "orders.cc"
_LANES = 16  # as there
_ALIGNED = 32  # bytes
_PIECE = 1 << 17  # rows of a sample index that are filled at a time: they stay in the processor's cache


class CompiledOrders:
    """Each method does what its counterpart in megatron_order.py and megatron_blend.py does, bit for bit."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.sample_rows.restype = ctypes.c_int64

    def shuffle(self, values: np.ndarray, random: np.random.RandomState) -> None:
        """random.shuffle of contiguous elements of 4 or 8 bytes."""
        assert values.flags.c_contiguous, "elements lie side by side"
        assert values.itemsize in (4, 8), f"an element has 4 or 8 bytes, not {values.itemsize}"
        name, key, position, has_gauss, gauss = random.get_state()
        key, place = np.array(key, np.uint32), np.array([position], np.int32)
        self._library.shuffle_values(
            _address(values), _int(values.itemsize), _int(values.size), _address(key), _address(place)
        )
        random.set_state((name, key, int(place[0]), has_gauss, gauss))

    def sample_rows(
        self, lengths: np.ndarray, documents: np.ndarray, seq_length: int, rows: int, dtype: np.dtype
    ) -> Iterator[np.ndarray]:
        """A sample index (rows, 2) in pieces; each is used again. Ends early where the documents do."""
        lengths, documents = (np.ascontiguousarray(array, np.int32) for array in (lengths, documents))
        piece, place = np.empty((_PIECE, 2), dtype), np.zeros(3, np.int64)
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
                _address(place),
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
        """The choices of a blend in lanes side by side, lane k from sample firsts[k] on, into row rows[k].

        weights (K,) float64; counts (K, lanes) float64, which are continued; which (…, steps) int16; numbers
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
            places = [
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
                *places,
                _int(numbers.itemsize),
            )
            counts[:, first : first + here] = inner[:, :here]


def compiled_orders(say: Callable[[str], None]) -> CompiledOrders | None:
    """None, and a line that says why, where the library cannot be built."""
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
