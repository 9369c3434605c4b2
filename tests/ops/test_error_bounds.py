"""Bounds of the error of a decoded number, derived from the formats and tested on the reference.

The kernels give the same bits (test_kernels.py), so the bounds are theirs too.

Let s be the stored scale, x a number of the block and q = x / s exactly. fp32 rounding of 1 / s, of the
product and of the decoded value each shift by at most 2^-24 of |q| <= 2^b: together under EPS steps.
- int to nearest: |x - decoded| <= |s| (1/2 + EPS), except at the two ends of the range, where q is clipped.
- Upper end: the largest code is 2^(b-1) - 1 while |q| reaches 2^(b-1), so |x - decoded| <= |s| (1 + EPS).
- A bf16 scale (8 significant bits) is off by up to 2^-8 of itself, so |q| may pass 2^(b-1) by that much.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.ops import reference
from megatron_zpp.ops.formats import QuantFormat
from tests.ops.cases import CODE_TYPES, FLOATS, garbage, plain

EPS = 2.0**-14


def there_and_back(x: Tensor, format: QuantFormat) -> tuple[Tensor, Tensor]:
    """Decoded numbers (fp32, like x) and the scale of each number, from x (rows, n)."""
    message = garbage(1, format.message_bytes(x.numel()))
    reference.quantize(x, message, *plain(format))
    decoded = torch.empty(x.shape)
    reference.dequantize(message, decoded, *plain(format))
    begin, blocks = x.numel() * format.bits // 8, x.numel() // format.block
    stored = message[0, begin : begin + 2 * blocks].clone().view(torch.bfloat16).float()
    return decoded, stored.repeat_interleave(format.block).view(x.shape)


def bound(x: Tensor, stored: Tensor, format: QuantFormat) -> Tensor:
    """The bound of the error of each number; see the top of the file."""
    x, step = x.double(), stored.double().abs()
    top = 2 ** (format.bits - 1)
    q = x / stored.double()
    inside = (q > -top) & (q < top - 1)
    return torch.where(inside, step * 0.5, step + top * step * 2.0**-8) + step * EPS


@settings(max_examples=60)
@given(
    code_type=st.sampled_from(CODE_TYPES),
    dtype=st.sampled_from(FLOATS),
    block=st.sampled_from((32, 256)),
    magnitude=st.floats(-12, 3),
    tail=st.floats(0.1, 8),
    draw=st.integers(0, 2**31),
)
def test_errors_are_within_the_formats_bound(
    code_type: str, dtype: torch.dtype, block: int, magnitude: float, tail: float, draw: int
) -> None:
    """Powers of normal numbers, so that blocks range from even ones to a single outlier."""
    format = QuantFormat(code_type, block)
    x = torch.randn(8, 2 * block, generator=torch.Generator().manual_seed(draw))
    x = (x.sign() * x.abs() ** tail).clamp(-60, 60) * 2.0**magnitude
    x = x.to(dtype)
    decoded, stored = there_and_back(x, format)
    assert ((decoded.double() - x.double()).abs() <= bound(x, stored, format)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_the_largest_magnitude_loses_the_rounding_of_a_bf16_scale(code_type: str, dtype: torch.dtype) -> None:
    """Nothing in bf16 and up to 2^-8 of itself in other formats: it arrives as its own rounding to bf16.

    The same magnitude with the other sign lacks one code of 2^(b-1) as well. What is left of it is rounded
    with the scale. Over many peaks both bounds are nearly reached.
    """
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(1)).clamp(-4, 4)
    x[:, 7] = 5.0 + torch.rand(4096, generator=torch.Generator().manual_seed(2)) * 5
    x[:, 9] = -x[:, 7]
    x = x.to(dtype)
    decoded, _ = there_and_back(x, QuantFormat(code_type, 32))
    peak = x[:, 7].double()
    assert torch.equal(decoded[:, 7], x[:, 7].bfloat16().float())
    lost = (decoded[:, 7] - peak).abs() / peak
    rounding = 0.0 if dtype == torch.bfloat16 else 2.0**-8
    assert 0.95 * rounding <= lost.max() <= rounding

    missing = 2.0 ** (1 - QuantFormat(code_type).bits)
    lost = (decoded[:, 9] + peak).abs() / peak
    bound = missing + (1 - missing) * rounding
    assert 0.95 * bound <= lost.max() <= bound


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_a_number_that_is_not_finite_arrives_as_nan_with_its_block(code_type: str, poison: float) -> None:
    x = torch.ones(4, 64)
    x[2, 33] = poison
    for dtype in FLOATS:
        format = QuantFormat(code_type, 64)
        message, output = garbage(1, format.message_bytes(256)), garbage(4, 64, dtype=dtype)
        reference.quantize(x, message, *plain(format))
        reference.dequantize(message, output, *plain(format))
        assert output[2].isnan().all()
        assert output[[0, 1, 3]].isfinite().all()
        assert message[0, 256 * format.bits // 8 :][4:6].tolist() == [0xC0, 0x7F]  # the canonical NaN
        per_block = 64 * format.bits // 8
        assert message[0, 2 * per_block : 3 * per_block].eq(0).all()
