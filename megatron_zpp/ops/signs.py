"""The random signs of a rotation, equal on all senders and receivers of a sum: their counters and generator.

The generator is Philox4x32-7 of Parallel Random Numbers: As Easy as 1, 2, 3 (Salmon et al., 2011). Seven
rounds are the fewest that passed BigCrush in the paper; its default of ten is a safety margin.
"""

from typing import NamedTuple

from torch import Tensor

_ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW_32, _LOW_16 = 0xFFFFFFFF, 0xFFFF


class Signs(NamedTuple):
    """The counter of the random signs of a run of elements (reference_rotation.py says how bits are drawn).

    `first` is the number of the first element inside its unit, a multiple of 128. Operators take the fields
    in this order.
    """

    seed: int
    unit: int
    iteration: int
    first: int = 0


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four random words per counter. All words are int64 tensors of one shape with values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_32, (k1 + _KEY_STEPS[1]) & _LOW_32
    return c0, c1, c2, c3


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product, computed in halves because the 64 bits do not fit int64."""
    low = (word & _LOW_16) * multiplier
    high = (word >> 16) * multiplier + (low >> 16)
    return high >> 16, (high & _LOW_16) << 16 | low & _LOW_16
