"""Bounds of the error of a decoded number, derived from the formats and tested on the reference.

The kernels give the same bits (test_kernels.py), so the bounds are theirs too.

Let s be the stored scale, x a number of the block and q = x / s exactly. fp32 rounding of 1 / s, of the
product and of the decoded value each shift by at most 2^-24 of |q| <= 2^b: together under EPS steps.
- int to nearest: |x - decoded| <= |s| (1/2 + EPS), except at the two ends of the range, where q is clipped.
- Upper end: the largest code is 2^(b-1) - 1 while |q| reaches 2^(b-1), so |x - decoded| <= |s| (1 + EPS).
- A bf16 scale (8 significant bits) is off by up to 2^-8 of itself, so |q| may pass 2^(b-1) by that much.
- fp8 has 3 mantissa bits: 2^-4 relative, or half a step of its subnormals, 2^-10 |s|.
- Stochastic: less than one step in either direction (1, 2^-3 relative, 2^-9 |s|), and right on average.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.ops import reference
from megatron_zpp.ops.formats import QuantFormat
from tests.ops.awkward import awkward
from tests.ops.cases import CODE_TYPES, FLOATS, SCALES, garbage, plain

EPS = 2.0**-14


def there_and_back(x: Tensor, format: QuantFormat, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Decoded numbers (fp32, like x) and the scale of each number, from x (rows, n)."""
    message = garbage(1, format.message_bytes(x.numel()))
    reference.quantize(x, message, *plain(format), format.rotate, seed)
    decoded = torch.empty(x.shape)
    reference.dequantize(message, decoded, *plain(format), format.rotate)
    begin, blocks = x.numel() * format.bits // 8, x.numel() // format.block
    stored = message[0, begin : begin + blocks * format.scales.itemsize].clone().view(format.scales).float()
    return decoded, stored.repeat_interleave(format.block).view(x.shape)


def bound(x: Tensor, stored: Tensor, format: QuantFormat, stochastic: bool) -> Tensor:
    """The bound of the error of each number; see the top of the file."""
    x, step = x.double(), stored.double().abs()
    if format.code_type == "fp8":
        relative, subnormal = (2.0**-3, 2.0**-9) if stochastic else (2.0**-4, 2.0**-10)
        return torch.maximum(relative * x.abs(), subnormal * step) * (1 + EPS)
    top = 2 ** (format.bits - 1)
    q = x / stored.double()
    inside = (q > -top) & (q < top - 1)
    beyond = top * step * 2.0**-8 if format.scales == torch.bfloat16 else 0
    return torch.where(inside, step * (1.0 if stochastic else 0.5), step + beyond) + step * EPS


@settings(max_examples=60, deadline=None)
@given(
    code_type=st.sampled_from(CODE_TYPES),
    scales=st.sampled_from(SCALES),
    dtype=st.sampled_from(FLOATS),
    block=st.sampled_from((32, 256)),
    magnitude=st.floats(-12, 3),
    tail=st.floats(0.1, 8),
    seed=st.none() | st.integers(0, 2**62),
    draw=st.integers(0, 2**31),
)
def test_errors_are_within_the_formats_bound(
    code_type: str,
    scales: torch.dtype,
    dtype: torch.dtype,
    block: int,
    magnitude: float,
    tail: float,
    seed: int | None,
    draw: int,
) -> None:
    """Powers of normal numbers, so that blocks range from even ones to a single outlier."""
    format = QuantFormat(code_type, block, scales)
    x = torch.randn(8, 2 * block, generator=torch.Generator().manual_seed(draw))
    x = (x.sign() * x.abs() ** tail).clamp(-60, 60) * 2.0**magnitude
    x = x.to(dtype)
    decoded, stored = there_and_back(x, format, seed)
    assert ((decoded.double() - x.double()).abs() <= bound(x, stored, format, seed is not None)).all()


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_stochastic_rounding_is_right_on_average(code_type: str, rotate: bool) -> None:
    """The mean of N draws is within 5 standard deviations, each at most half a step / sqrt(N)."""
    format, draws = QuantFormat(code_type, 256, torch.float32, rotate), 2000
    x = torch.randn(256, generator=torch.Generator().manual_seed(9))
    x[3] = -9.0  # negative, so that the largest positive numbers are not clipped
    decoded, _ = there_and_back(x.repeat(draws, 1), format, seed=77)
    mean, variance = decoded.double().mean(0), decoded.double().var(0)
    # Rotated numbers of the same 32 may be clipped at the upper end, by up to one step: 9 / 2^(b-1) at most.
    clipped = 2 * x.abs().max() * 2.0 ** (1 - format.bits) if rotate and code_type != "fp8" else 0.0
    # If hardly any draw rounds in one of the directions, the sample variance may be zero.
    unseen = (2 * x.abs().max() * 2.0**-format.bits) ** 2 * 4 / draws
    tolerance = 5 * ((variance + unseen) / draws).sqrt() + clipped + 1e-6 * x.abs().max()
    assert ((mean - x.double()).abs() <= tolerance).all()
    assert (variance > 0).float().mean() > 0.9


@pytest.mark.parametrize(("dtype", "scales"), list(zip(FLOATS[:2], SCALES[::-1], strict=True)))
@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_the_largest_magnitude_is_exact(code_type: str, dtype: torch.dtype, scales: torch.dtype) -> None:
    """Its code is a power of two, and bf16 numbers with bf16 scales, or fp32 with fp32, round no scale."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, 7] = 5.0 + torch.arange(64) / 32
    x[::2, 7] *= -1
    for seed in (None, 5):
        decoded, _ = there_and_back(x, QuantFormat(code_type, 256, scales), seed)
        assert torch.equal(decoded[:, 7], x[:, 7].float())
    x[:, 9] = -x[:, 7]  # both signs: the positive one is exact
    decoded, _ = there_and_back(x, QuantFormat(code_type, 256, scales))
    assert torch.equal(decoded.amax(1), x[:, 7].float().abs())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_the_largest_magnitude_loses_the_rounding_of_a_bf16_scale(code_type: str, dtype: torch.dtype) -> None:
    """Nothing in bf16 and up to 2^-8 of itself in other formats: it arrives as its own rounding to bf16.

    The same magnitude with the other sign lacks one code of 2^(b-1) as well. What is left of it is rounded
    with the scale. Over many peaks both bounds are nearly reached; fp8 has both signs alike.
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

    missing = 0.0 if code_type == "fp8" else 2.0 ** (1 - QuantFormat(code_type).bits)
    lost = (decoded[:, 9] + peak).abs() / peak
    bound = missing + (1 - missing) * rounding
    assert 0.95 * bound <= lost.max() <= bound


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_a_number_that_is_not_finite_arrives_as_nan_with_its_block(
    code_type: str, rotate: bool, poison: float
) -> None:
    x = torch.ones(4, 64)
    x[2, 33] = poison
    for dtype in FLOATS:
        format = QuantFormat(code_type, 64, rotate=rotate)
        message, output = garbage(1, format.message_bytes(256)), garbage(4, 64, dtype=dtype)
        reference.quantize(x, message, *plain(format), rotate)
        reference.dequantize(message, output, *plain(format), rotate)
        assert output[2].isnan().all()
        assert output[[0, 1, 3]].isfinite().all()
        assert message[0, 256 * format.bits // 8 :][4:6].tolist() == [0xC0, 0x7F]  # the canonical NaN
        per_block = 64 * format.bits // 8
        assert message[0, 2 * per_block : 3 * per_block].eq(0).all()


def test_what_the_rounding_of_a_scale_makes_infinite_is_not_fed_back() -> None:
    """The bf16 scale of the largest fp32 number is rounded up, so the decoded number overflows."""
    source, target = QuantFormat("int8", 32, torch.float32), QuantFormat("int4", 64)
    x = torch.zeros(1, 64)
    x[0, 5], x[0, 6] = torch.finfo(torch.float32).max, 1e37
    messages, output = garbage(1, source.message_bytes(64)), garbage(1, target.message_bytes(64))
    reference.quantize(x, messages, *plain(source), False)
    error = torch.ones(64)
    reference.sum_quantize(messages, output, *plain(source), *plain(target), error)
    decoded = torch.empty(1, 64)
    reference.dequantize(output, decoded, *plain(target), False)
    assert decoded[0, 5].isinf()  # the receiver sees an overflow
    assert error[5] == 0
    assert error[6] > 0
    assert error.isfinite().all()


def test_a_block_that_is_not_finite_leaves_its_error_alone() -> None:
    """A NaN of one step must not return in the next one with the error."""
    source, target = QuantFormat("int8", 32), QuantFormat("int4", 64)
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(3))
    x[0, 70] = float("nan")
    messages = garbage(1, source.message_bytes(256))
    reference.quantize(x, messages, *plain(source), False)
    error = torch.full((256,), 0.25)
    reference.sum_quantize(
        messages, garbage(2, target.message_bytes(128)), *plain(source), *plain(target), error
    )
    assert (error[64:128] == 0.25).all()
    assert error.isfinite().all()
    assert not (error[:64] == 0.25).all()
    assert not (error[128:] == 0.25).all()


def test_error_feedback_sends_everything_in_the_end() -> None:
    """The mean of the messages of N rounds differs by an error / N from the exact value."""
    source, target, rounds = QuantFormat("int8", 32, torch.float32), QuantFormat("int4", 64), 50
    messages = garbage(2, source.message_bytes(256))
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(4))
    reference.quantize(x, messages, *plain(source), False)
    wanted, error, sent = torch.zeros(256), torch.zeros(256), torch.zeros(256, dtype=torch.float64)
    reference.sum_into(messages, wanted, *plain(source), False, 1.0, False)
    for _ in range(rounds):
        output, back = garbage(1, target.message_bytes(256)), torch.empty(1, 256)
        reference.sum_quantize(messages, output, *plain(source), *plain(target), error)
        reference.dequantize(output, back, *plain(target), False)
        sent += back[0]
    step = wanted.abs().max() / 8
    assert (sent / rounds - wanted).abs().max() <= 2 * step / rounds


def test_fp16_saturates_but_keeps_infinity_out_of_finite_numbers() -> None:
    """A finite number above 65504 becomes 65504, because a gather must not make weights infinite."""
    format = QuantFormat("int8", 32)
    x = torch.full((1, 64), 70000.0)
    x[0, 32:] = -1e30
    message, output = garbage(1, format.message_bytes(64)), torch.empty(1, 64, dtype=torch.float16)
    reference.quantize(x, message, *plain(format), False)
    reference.dequantize(message, output, *plain(format), False)
    assert (output[0, :32] == 65504).all()
    assert (output[0, 32:] == -65504).all()


@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_padding_is_zero_and_inputs_stay(code_type: str) -> None:
    format = QuantFormat(code_type, 32)
    x = awkward(3, 32 * 7, 32, torch.bfloat16)
    before, messages = x.clone(), garbage(3, format.message_bytes(32 * 7))
    reference.quantize(x, messages, *plain(format), False)
    used = 7 * format.block_bytes
    assert messages.shape[1] > used
    assert (messages[:, used:] == 0).all()
    assert torch.equal(x.view(torch.int16), before.view(torch.int16))


def test_rotation_is_orthonormal_and_its_own_inverse() -> None:
    from megatron_zpp.ops.block_codes import rotate_32

    matrix = rotate_32(torch.eye(32))
    assert torch.allclose(matrix @ matrix, torch.eye(32), atol=1e-6)
    assert torch.equal(matrix, matrix.T)
    x = torch.randn(100, 32, generator=torch.Generator().manual_seed(1))
    # 5 butterflies and a product, twice: each adds at most 2^-24 of a number below the vector's norm.
    assert ((rotate_32(rotate_32(x)) - x).abs().amax(1) <= 12 * 2.0**-24 * x.norm(dim=1)).all()
