"""AdamW's states in fewer bytes: what their forms hold, and the kernel against the reference, bit for bit."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.ops import reference_compact
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.state_codes import (
    DTYPES,
    Rounding,
    decode,
    draws_of,
    encode,
    split_weights,
)
from tests.ops.agreement import assert_same_bits
from tests.ops.awkward import sprinkled
from tests.ops.cases import FLOATS, adamw_scalars, garbage

FORMS = tuple(DTYPES)
ROUNDED = ("fp16", "bf16", "fp8")
STEPS = {"fp8": (1 / 8, 1 / 8), "fp16": (2.0**-10, 2.0**-9), "bf16": (2.0**-7, 2.0**-7)}
LARGEST = torch.finfo(torch.float32).max


def rounding(step: int = 3, first: int = 0) -> Rounding:
    return Rounding(torch.tensor(float(step)), unit=5, first=first)


def spread(blocks: int) -> Tensor:
    """Moments of blocks whose elements are up to some hundred times apart; 128 numbers each."""
    generator = torch.Generator().manual_seed(blocks)
    x = torch.randn(blocks, 128, generator=generator)
    x *= torch.exp(torch.randn(blocks, 128, generator=generator))
    return (x * torch.exp2(torch.randint(-60, 60, (blocks, 1), generator=generator))).flatten()


def awkward(second: bool) -> Tensor:
    """Blocks of zeros, subnormals, one huge number, infinities, NaN, and numbers of all exponents."""
    blocks = torch.zeros(10, 128)
    blocks[1] = 1e-41
    blocks[2] = torch.linspace(-1e-8, 1e-8, 128)
    blocks[2, 7] = 1e30
    blocks[3] = torch.linspace(1, 2, 128)
    blocks[3, 5] = torch.inf
    blocks[4, 3:7] = torch.tensor([torch.nan, 1.0, -torch.inf, torch.inf])
    blocks[5] = torch.exp2(-torch.arange(128.0))
    blocks[6] = LARGEST
    blocks[7] = -torch.exp2(torch.arange(128.0))
    blocks[8] = sprinkled(128, torch.float32).nan_to_num()
    blocks[9, ::2] = -0.0
    return (blocks.abs() if second else blocks).flatten()


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("form", ROUNDED)
def test_moments_are_off_by_less_than_a_step(form: Any, second: bool) -> None:
    """Of numbers within a factor of 1,000 of their block's peak; and without draws by half a step."""
    x = spread(300).abs() if second else spread(300)
    peaks = x.view(-1, 128).abs().amax(1, keepdim=True).expand(-1, 128).flatten()
    held = x.abs() > peaks * (1e-6 if second else 1e-3)
    for draws, steps in ((draws_of(rounding(), slice(0, len(x)))[second], 1.0), (None, 0.51)):
        decoded = decode(*encode(x, form, second=second, draws=draws), second=second)
        error = ((decoded - x).abs() / x.abs())[held].max().item()
        assert error <= steps * STEPS[form][second] * 1.04  # a root's step counts twice, and its square


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_decoding_and_encoding_again_changes_no_bit(form: Any, second: bool) -> None:
    for x in (awkward(second), spread(300).abs() if second else spread(300)):
        values, scales = encode(x, form, second=second, draws=draws_of(rounding(), slice(0, len(x)))[second])
        decoded = decode(values, scales, second=second)
        again, its_scales = encode(decoded, form, second=second)
        assert_same_bits(again, values)
        assert scales is None or torch.equal(its_scales, scales)
        assert_same_bits(decode(again, its_scales, second=second), decoded)


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("form", ROUNDED)
def test_numbers_are_kept_on_average(form: Any, second: bool) -> None:
    """The mean of 4,000 roundings, of the numbers whose root is taken of their root."""
    x = torch.rand(128, generator=torch.Generator().manual_seed(1)) + 0.1
    many = x.repeat(4000)
    draws = draws_of(rounding(), slice(0, len(many)))[second]
    decoded = decode(*encode(many, form, second=second, draws=draws), second=second)
    if second and form != "bf16":
        x, decoded = x.sqrt(), decoded.sqrt()
    error = (decoded.view(4000, 128).double().mean(0) - x).abs() / x
    assert error.max() < 5 * STEPS[form][second] / 2 / 4000**0.5
    changed = decode(*encode(many, form, second=second), second=second)
    assert changed.view(4000, 128)[0].equal(changed.view(4000, 128)[1])  # without draws none


def states_of(m: int, forms: tuple[str, str], split: bool, gradients: torch.dtype, source: Any) -> list[Any]:
    """Arguments of adamw_compact: every kind of block in the moments, in all forms."""
    generator = torch.Generator().manual_seed(m)
    moments: list[Any] = []
    for second, form in enumerate(forms):
        x = torch.cat([awkward(bool(second)), spread(300)])[:m]
        moments += encode(x.abs() if second else x, form, second=bool(second))  # type: ignore[arg-type]
    weights = torch.randn(m, generator=generator)
    gather_source = None if source is None else garbage(m, dtype=source)
    if split:
        gather_source, weights = split_weights(weights)
    gradient = sprinkled(m, gradients, seed=m)
    gradient[m // 2 :] = 1e-3 * torch.randn(m - m // 2, generator=generator)  # blocks without special cases
    return [weights, gradient, *moments, gather_source]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("forms", list(itertools.product(FORMS, FORMS)))
def test_the_kernel_is_the_reference(forms: tuple[str, str], split: bool, device: str) -> None:
    """All forms of weights and moments, gradients and gather sources; one block, odd numbers of blocks."""
    sources = (torch.bfloat16,) * 3 if split else (None, torch.bfloat16, torch.float16)
    for m, gradients, source in zip((128, 128 * 101, 128 * 301), FLOATS, sources, strict=True):
        for found_inf, divisor in ((0.0, 1.0), (0.0, 3.7), (1.0, 1.0)):
            expected = states_of(m, forms, split, gradients, source)
            actual = [
                None if each is None else each.to(device)
                for each in states_of(m, forms, split, gradients, source)
            ]
            counter = Rounding(torch.tensor(7.0), unit=3, first=128 * 5)
            on_device = Rounding(counter.step.to(device), 3, 128 * 5)
            scalars = adamw_scalars(found_inf, divisor)
            reference_compact.adamw_compact(*expected, *scalars.packed(), m // 3, *counter.packed())
            scalars = adamw_scalars(found_inf, divisor, device=device)
            Operations(torch.ops.megatron_zpp, compiled=True).adamw_compact(
                *actual, scalars, on_device, decayed=m // 3
            )
            for position, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
                if mine is not None:
                    assert_same_bits(mine.cpu(), theirs, f"argument {position}, {found_inf}")


@pytest.mark.usefixtures("kernels")
def test_arguments_are_refused() -> None:
    def call(position: int, value: Any, **options: Any) -> None:
        tensors = states_of(256, ("fp8", "fp8"), True, torch.float32, None)
        tensors[position] = value
        first = Rounding(torch.tensor(1.0), 0, options.get("first", 0))
        Operations(torch.ops.megatron_zpp, compiled=True).adamw_compact(
            *tensors, adamw_scalars(), first, decayed=options.get("decayed", 0)
        )

    for position, value, said in (
        (0, torch.zeros(255), "master must be contiguous floats or bytes of shape"),
        (1, torch.zeros(255), "gradient must be float32 or bfloat16 or float16 of shape"),
        (2, torch.zeros(256, dtype=torch.int32), "exp_avg must be"),
        (3, None, "exp_avg_scales must be given"),
        (3, torch.zeros(3, dtype=torch.uint8), "exp_avg_scales must be uint8 of shape"),
        (4, torch.zeros(256), "exp_avg_sq_scales must be given if exp_avg_sq is float16 or uint8, and only"),
        (6, None, "gather_source must be given with a master of bytes"),
        (6, torch.zeros(256).half(), "gather_source must be bfloat16 of shape"),
    ):
        with pytest.raises(ValueError, match=said):
            call(position, value)
    for options, said in (
        ({"first": 100}, "first must be a multiple of 128"),
        ({"decayed": 257}, "decayed must be from 0 to 256"),
    ):
        with pytest.raises(ValueError, match=said):
            call(6, torch.zeros(256).bfloat16(), **options)
