"""The format, one number at a time: a third implementation, made from its description.

Slow on purpose: Python's exact fractions decide every rounding, so it shares no arithmetic with the reference
or the kernels. numpy only stores fp32 numbers.
"""

import struct
from fractions import Fraction

import numpy as np

FACTORS = {"int8": -Fraction(1, 2**7), "int4": -Fraction(1, 2**3)}
BITS = {"int8": 8, "int4": 4}


def to_even(x: Fraction) -> int:
    """The nearest integer, ties to even."""
    return round(x)


def exponent_of(x: Fraction) -> int:
    """The e for which 2^e <= |x| < 2^(e + 1)."""
    guess = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return guess if abs(x) >= Fraction(2) ** guess else guess - 1


def rounded(x: Fraction, precision: int, smallest_exponent: int) -> Fraction:
    """The nearest number of a binary format with `precision` significant bits, subnormals included."""
    if x == 0:
        return x
    unit = Fraction(2) ** (max(exponent_of(x), smallest_exponent) - precision + 1)
    return to_even(x / unit) * unit


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
    q = to_even(x * inverse)
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


def decode_one(code: int, stored: Fraction) -> Fraction:
    """The value of one code."""
    return fp32(code * stored)


def adamw_element(
    w: float,
    gradient: float,
    m: float,
    v: float,
    *,
    divisor: float,
    corrections: tuple[float, float],
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[float, float, float]:
    """New weight and moments of one element; numpy's fp32 scalars round each step once."""
    f = np.float32
    beta1, beta2 = betas
    g = f(gradient) * (f(1) / f(divisor))
    w = f(w)
    if weight_decay:
        w = w - f(learning_rate * weight_decay) * w
    m = f(beta1) * f(m) + f(1 - beta1) * g
    v = f(beta2) * f(v) + f(1 - beta2) * (g * g)
    denominator = np.sqrt(v) / np.sqrt(f(corrections[1])) + f(eps)
    w = w - (f(learning_rate) / f(corrections[0])) * (m / denominator)
    return float(w), float(m), float(v)
