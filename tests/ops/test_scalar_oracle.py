"""The reference equals the format's description in exact fractions, one number at a time.

This is a third implementation, slow on purpose: Python's exact fractions decide every rounding, so it shares
no arithmetic with the reference or the kernels. numpy only stores fp32 numbers.
"""

import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron_zpp.ops import reference
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.signs import philox
from tests.ops.awkward import KINDS, awkward
from tests.ops.cases import CODE_TYPES, garbage

FACTORS = {"int8": -Fraction(1, 2**7), "int4": -Fraction(1, 2**3)}
BITS = {"int8": 8, "int4": 4}


def exponent_of(x: Fraction) -> int:
    """The e for which 2^e <= |x| < 2^(e + 1)."""
    guess = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return guess if abs(x) >= Fraction(2) ** guess else guess - 1


def rounded(x: Fraction, precision: int, smallest_exponent: int) -> Fraction:
    """The nearest number of a binary format with `precision` significant bits, subnormals included."""
    if x == 0:
        return x
    unit = Fraction(2) ** (max(exponent_of(x), smallest_exponent) - precision + 1)
    return round(x / unit) * unit  # ties to even


def fp32(x: Fraction) -> Fraction:
    """One fp32 rounding; the numbers of the tests do not overflow."""
    return rounded(x, 24, -126)


def bf16(x: Fraction) -> Fraction:
    """One bf16 rounding."""
    return rounded(x, 8, -126)


def encode_block(values: np.ndarray, code_type: str) -> tuple[list[int], float]:
    """Codes and the stored scale of one block of fp32 numbers."""
    if not np.isfinite(values).all():
        return [0] * len(values), float("nan")
    x = [Fraction(float(value)) for value in values]
    largest = max(abs(value) for value in x)
    peak = largest if largest in x else -largest
    stored = bf16(fp32(peak * FACTORS[code_type]))
    if abs(stored) < Fraction(1, 2**126):
        return [0] * len(x), 0.0
    inverse = fp32(1 / stored)
    return [encode_one(value, inverse, code_type) for value in x], float(stored)


def encode_one(x: Fraction, inverse: Fraction, code_type: str) -> int:
    """The code of one number."""
    q = round(x * inverse)
    top = 2 ** (BITS[code_type] - 1)
    return int(max(-top, min(q, top - 1)))


def message_of(values: np.ndarray, code_type: str, block: int) -> bytes:
    """The message of numbers (elements,)."""
    code_bytes, scale_bytes = bytearray(), bytearray()
    for start in range(0, len(values), block):
        coded, stored = encode_block(values[start : start + block], code_type)
        if code_type == "int4":
            pairs = zip(coded[0::2], coded[1::2], strict=True)
            code_bytes += bytes(low & 15 | (high & 15) << 4 for low, high in pairs)
        else:
            code_bytes += bytes(code & 255 for code in coded)
        bits = 0x7FC00000 if np.isnan(stored) else struct.unpack("<I", struct.pack("<f", stored))[0]
        scale_bytes += struct.pack("<H", bits >> 16)
    message = bytes(code_bytes + scale_bytes)
    return message + bytes(-len(message) % 16)


ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_gives_random123s_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    given = tuple(torch.tensor([word]) for word in counter)
    assert tuple(word.item() for word in philox(given, key)) == words


@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_messages(code_type: str) -> None:
    """Every kind of block except negative zeros, which fractions lack."""
    block = 32
    x = awkward(2, block * KINDS, block, torch.float32)
    x = torch.where(x == 0, 0.0, x)
    messages = garbage(1, QuantFormat(code_type, block).message_bytes(x.numel()))
    reference.quantize(x, messages, code_type, block)
    expected = message_of(x.flatten().numpy(), code_type, block)
    assert bytes(messages[0].tolist()) == expected
