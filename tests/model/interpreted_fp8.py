"""A program: the Triton kernels of 8-bit casts by Triton's interpreter, on CPUs: every bit of the oracle's.

It wants TRITON_INTERPRET=1, as tests/model/interpreted.py does.
"""

import itertools
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.components import ModelComponents
from megatron_zpp.model.fp8.cast import FORMATS, GRADIENT, INPUT, LARGEST, WEIGHT, factors_of, plain_cast
from megatron_zpp.model.fp8.delayed import DelayedLinear
from megatron_zpp.model.fp8.kernels import blocks as coded_blocks
from megatron_zpp.model.fp8.kernels import cast as fused_cast
from megatron_zpp.model.fp8.kernels import (
    coded_activation,
    coded_loss,
    coded_norm,
    gradient_cast,
    weight_codes,
)
from megatron_zpp.model.fp8.scaling import DelayedScaling
from megatron_zpp.model.fp8.weights import WeightCodes, plain_encode
from megatron_zpp.model.fused import linear as fused_linear
from megatron_zpp.model.fused import loss as fused_loss
from megatron_zpp.model.fused import norm as fused_norm
from megatron_zpp.model.fused import rotary as fused_rotary
from megatron_zpp.model.fused import swiglu as fused_swiglu
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.layer import PLAIN_BLOCK, transformer_block
from megatron_zpp.model.loss import CODE_UNIT, IGNORED, logits_to_gradient
from tests.model.variants import LLAMA

fused_cast.wrap_triton = lambda kernel: kernel


@triton.jit
def rounded(x, FORMAT: tl.constexpr):
    """What GPUs have an instruction for; the interpreter's own conversion breaks ties and NaN otherwise."""
    FRACTION: tl.constexpr = 2 if tl.float8e5 == FORMAT else 3  # bits
    BIAS: tl.constexpr = 15 if tl.float8e5 == FORMAT else 7
    MOST: tl.constexpr = 57344.0 if tl.float8e5 == FORMAT else 448.0
    size = tl.where(x == x, tl.minimum(tl.abs(x), MOST), x)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, 1 - BIAS)
    step = ((exponent - FRACTION + 127) << 23).to(tl.float32, bitcast=True)
    ROUNDS: tl.constexpr = 8388608.0  # 2^23: the sum has no bits below 1, and is rounded to even
    value = ((size / step + ROUNDS) - ROUNDS) * step
    least = step * 0 + 2.0 ** (1 - BIAS - FRACTION)
    normal = (value.to(tl.int32, bitcast=True) >> (23 - FRACTION)) - ((127 - BIAS) << FRACTION)
    code = tl.where(value < 2.0 ** (1 - BIAS), (value / least).to(tl.int32), normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    code = tl.where(x == x, code | sign, 127)
    return code.to(tl.uint8).to(FORMAT, bitcast=True)


@triton.jit
def exp2(x):
    return tl.exp2(x)


@triton.jit
def reciprocal(x):
    return 1.0 / x


@triton.jit
def packed(first, second, third, fourth, FORMAT: tl.constexpr):
    low = _byte(first, FORMAT) | (_byte(second, FORMAT) << 8)
    return low | (_byte(third, FORMAT) << 16) | (_byte(fourth, FORMAT) << 24)


@triton.jit
def _byte(x, FORMAT: tl.constexpr):
    return rounded(x, FORMAT).to(tl.uint8, bitcast=True).to(tl.int32)


for module in (fused_cast, coded_activation, coded_loss, coded_norm, gradient_cast, weight_codes):
    module.rounded, module.packed = rounded, packed
for module in (
    coded_activation,
    coded_loss,
    coded_norm,
    gradient_cast,
    fused_linear,
    fused_loss,
    fused_norm,
    fused_rotary,
    fused_swiglu,
):
    module.wrap_triton = lambda kernel: kernel
    module.exp2, module.reciprocal = exp2, reciprocal  # the interpreter knows no instructions of GPUs


def same_codes(found: Tensor, expected: Tensor) -> None:
    """Bit for bit, of NaN that both are."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    unlike = found.view(torch.uint8) != expected.view(torch.uint8)
    both = found.float().isnan() & expected.float().isnan()
    assert not (unlike & ~both).any(), (found[unlike], expected[unlike])


def awkward(rows: int, width: int, kind: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers (R, W) and their factors: all magnitudes, ties between codes, what saturates, NaN and Inf."""
    x = torch.randn(rows, width) * 2.0 ** torch.randint(-30, 12, (rows, width))
    every = torch.arange(256, dtype=torch.uint8).view(FORMATS[kind]).float()
    every = every[every.isfinite()].sort().values
    ties = torch.cat((every, (every[1:] + every[:-1]) / 2)) / 8
    flat = x.view(-1)
    some = ties[torch.randperm(len(ties))[: len(flat) // 2]]
    flat[: len(some)] = some
    flat[-1] = 4 * LARGEST[kind]
    flat[0], flat[1], flat[2] = 0.0, -0.0, 1e-40
    flat[3], flat[4], flat[5] = torch.nan, torch.inf, -torch.inf
    scale = torch.tensor([1.7, 0.3, 8.0])
    scale[kind] = 8.0
    return x.to(dtype), factors_of(scale)


def casts(rows: int, width: int, dtype: torch.dtype) -> None:
    layouts = [(True, False)]
    layouts += [(True, True), (False, True)] if rows > 1 else []  # a row alone has no gradients
    for kind, (by_rows, by_columns) in itertools.product((INPUT, WEIGHT, GRADIENT), layouts):
        x, factors = awkward(rows, width, kind, dtype)
        for before in (0.0, 1e30) if by_rows and by_columns else (0.0,):
            found, expected = (torch.full((3,), before) for _ in range(2))
            mine = fused_cast.cast(x, factors, found, kind, rows=by_rows, columns=by_columns)
            theirs = plain_cast(x, factors, expected, kind, rows=by_rows, columns=by_columns)
            for ours, oracle in zip(mine, theirs, strict=True):
                same_codes(ours, oracle)
            assert torch.equal(found, expected)


def held_weights(height: int, width: int) -> None:
    """Codes that are written in parts, and transposed."""
    x, factors = awkward(height, width, WEIGHT, torch.float32)
    found, expected = torch.zeros(2, 3)
    oracle, turned = plain_cast(x, factors, expected, WEIGHT, rows=True, columns=True)
    codes = torch.zeros(height * width, dtype=FORMATS[WEIGHT])
    for cut in (slice(0, 256), slice(256, None)):
        weight_codes.encode_weights(x.view(-1)[cut], codes[cut], factors, found)
    same_codes(codes.view(height, width), oracle)
    assert torch.equal(found, expected)
    same_codes(weight_codes.transpose(oracle, x), turned)


def gradients(rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of one part, and of three that are joined: codes in both layouts, largest magnitude and sums."""
    joined, factors = awkward(rows, sum(widths), GRADIENT, dtype)
    parts = joined.split(widths, 1)
    for sums in (True, False):
        found, expected = torch.zeros(2, 3)
        if len(parts) == 1:
            *mine, along = gradient_cast.cast_gradient(joined, factors, found, sums=sums)
        else:
            *mine, along = gradient_cast.cast_gradients_of_heads(*parts, factors, found, sums=sums)
        theirs = plain_cast(joined, factors, expected, GRADIENT, rows=True, columns=True)
        for ours, oracle in zip(mine, theirs, strict=True):
            same_codes(ours, oracle)
        assert torch.equal(found, expected)
        wide = joined.double()
        assert along.shape == ((sum(widths),) if sums else (0,))
        if sums:
            right = (along - wide.sum(0)).abs() <= rows * 2.0**-24 * wide.abs().sum(0)
            assert (right | ~wide.isfinite().all(0)).all()


def by_formula(x: Tensor, of_out: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """The activation and the gradient of x by the kernels' formulas in numpy, whose exponentials are the
    interpreter's too; tests/gpu/test_fp8.py compares both with torch's.
    """
    log2_e, slope, cubic = 1.4426950408889634, coded_activation._SLOPE, coded_activation._CUBIC
    one = np.float32(1.0)
    wide, of_wide = x.float().numpy(), of_out.float().numpy()
    if gated:
        gate, up = np.split(wide, 2, axis=1)
        share = one / (one + np.exp2(gate * np.float32(-log2_e)))
        out = gate * share * up
        parts = (of_wide * up * share * (one + (gate - gate * share)), of_wide * gate * share)
        gradient = np.concatenate(parts, axis=1)
    else:
        square = wide * wide
        power = wide * (np.float32(-log2_e * slope) - np.float32(log2_e * cubic) * square)
        share = one / (one + np.exp2(power))
        out = wide * share
        inner = np.float32(slope) + np.float32(3 * cubic) * square
        gradient = of_wide * share * (one + (wide - wide * share) * inner)
    return torch.from_numpy(out), torch.from_numpy(gradient)


def activations(rows: int, width: int, gated: bool, biased: bool, dtype: torch.dtype) -> None:
    """Codes are those that a cast makes of what the formulas say."""
    outer = 2 * width if gated else width
    x, of_out = (3 * torch.randn(rows, outer)).to(dtype), torch.randn(rows, width).to(dtype)
    bias = torch.randn(outer).to(dtype) if biased else None
    x[0, 0], of_out[-1, -1] = torch.nan, torch.inf
    factors = factors_of(torch.tensor([300.0, 1.0, 20000.0]))
    shifted = x if bias is None else x + bias
    out, gradient = by_formula(shifted, of_out, gated)
    for columns in (True, False):
        found, expected = torch.zeros(2, 3)
        mine = coded_activation.coded_activation(x, bias, factors, found, gated, columns)
        theirs = plain_cast(out, factors, expected, INPUT, rows=True, columns=columns)
        for ours, oracle in zip(mine, theirs, strict=True):
            same_codes(ours, oracle)
        assert torch.equal(found, expected)
    found, expected = torch.zeros(2, 3)
    *mine, sums = coded_activation.coded_activation_backward(of_out, x, bias, factors, found, gated)
    theirs = plain_cast(gradient, factors, expected, GRADIENT, rows=True, columns=True)
    for ours, oracle in zip(mine, theirs, strict=True):
        same_codes(ours, oracle)
    assert torch.equal(found, expected)
    assert sums.shape == ((outer,) if biased else (0,))
    if biased:
        wide = gradient.double()
        allowed = wide.abs().sum(0) * (rows * 2.0**-24 + torch.finfo(dtype).eps)
        unlike = (sums.double() - wide.sum(0)).abs() > allowed
        assert not unlike[wide.isfinite().all(0)].any()


def norms(rows: int, width: int, adds: bool, biased: bool, dtype: torch.dtype) -> None:
    """Codes are those of the norm that follows from the kernel's own mean and deviation, which are right."""
    x, added, (weight, bias) = 3 * torch.randn(rows, width), torch.randn(rows, width), torch.randn(2, width)
    x[::3] += 5.0
    x, added, weight, bias = (part.to(dtype) for part in (x, added, weight, bias))
    factors = factors_of(torch.tensor([150.0, 1.0, 1.0]))
    total = x + added if adds else x
    for columns in (True, False) if rows > 1 else (False,):
        maxima, expected = torch.zeros(2, 3)
        found = coded_norm._coded_norm(
            *(x, added if adds else None, weight, bias if biased else None),
            *(1e-5, factors, maxima, columns),
        )
        summed, mean, rstd, *codes = found
        assert torch.equal(summed, total if adds else total.new_empty(0))
        wide = total.double()
        centre = wide.mean(1) if biased else torch.zeros(rows)
        rounding = width * 2.0**-24
        if biased:
            assert ((mean - centre).abs() <= rounding * wide.abs().mean(1)).all()
        exact = ((wide - centre[:, None]).square().mean(1) + 1e-5).rsqrt()
        assert ((rstd - exact).abs() <= 4 * rounding * exact).all()
        centred = total.float() - mean[:, None] if biased else total.float()
        normed = centred * rstd[:, None] * weight.float()
        normed = normed + bias.float() if biased else normed
        oracle = plain_cast(normed, factors, expected, INPUT, rows=True, columns=columns)
        for ours, theirs in zip(codes, oracle, strict=True):
            same_codes(ours, theirs)
        assert torch.equal(maxima, expected)


def losses(tokens: int, entries: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Codes of the gradient are float64's but next to ties, and turned in a part of a larger tensor."""
    logits, targets = (3 * torch.randn(tokens, entries)).to(dtype), torch.randint(vocab_size, (tokens,))
    targets[1], logits[0, targets[0]], logits[2, 5], logits[3, 6] = IGNORED, 12.0, torch.nan, -torch.inf
    logits[1, 1] = torch.nan  # does not count
    exact = logits.double()
    expected = logits_to_gradient(exact, targets, vocab_size)
    gradient, ones = exact.float() * CODE_UNIT, factors_of(torch.ones(3))
    oracle, _ = plain_cast(gradient, ones, torch.zeros(3), GRADIENT, rows=True, columns=False)
    rows, whole = torch.empty_like(oracle), torch.zeros(entries, tokens + 48, dtype=oracle.dtype)
    columns = whole[:, 16 : 16 + tokens]
    found = coded_loss.logits_to_codes(logits, targets, vocab_size, rows, columns)
    assert found.isnan()
    assert expected.isnan()
    same_codes(columns.t().contiguous(), rows)
    assert whole.float().nan_to_num().count_nonzero() == columns.float().nan_to_num().count_nonzero()
    others, counted = [0, *range(3, tokens)], [0, *range(2, tokens)]
    assert rows[2, :vocab_size].float().isnan().all()
    assert rows[1].float().count_nonzero() == 0
    assert rows[others, vocab_size:].float().count_nonzero() == 0
    unlike = (rows.view(torch.uint8) != oracle.view(torch.uint8))[others]
    steps, sizes = (rows.float() - oracle.float())[others].abs(), oracle.float()[others].abs()
    assert unlike.float().mean() < 2.0**-12
    assert (steps <= sizes / 4 + 2.0**-8)[unlike].all()
    logits[2, 5] = 0.0
    found = coded_loss.logits_to_codes(logits, targets, vocab_size, rows, columns)
    expected = logits_to_gradient(logits[counted].double(), targets[counted], vocab_size)
    assert abs(found - expected) <= 2e-6 * expected


def hold(layer: nn.Module, weights: WeightCodes) -> None:
    """Let products take codes of a layer's weights, and give them parameters without contents."""
    weights.begin()
    for name in weights.names:
        linear = layer.get_submodule(name.removesuffix(".weight"))
        codes = torch.zeros(linear.weight.shape, dtype=torch.uint8)
        weights.encode(name, linear.weight.data.view(-1), codes.view(-1))
        weights.attach(name, codes)
        linear.weight = nn.Parameter(torch.full((), torch.nan).expand(codes.shape))


def layers(held: bool = False, **variant: Any) -> None:
    """A layer with kernels and without: codes differ only where roundings of the norm or GELU do.

    `held`: weights are held as codes.
    """
    config = ModelConfig(
        num_layers=1,
        hidden_size=48,
        num_attention_heads=3,
        seq_length=16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **variant,
    )
    rotation, x = None, torch.randn(2, 16, 48, requires_grad=True)
    found = []
    for kernels in (False, True):
        linear = partial(DelayedLinear, cast=plain_cast)
        if kernels:
            linear = partial(DelayedLinear, cast=fused_cast.cast, transpose=weight_codes.transpose)
        model = GPT(config, 64, parts=ModelComponents(linear=linear)).initialize(3)
        layer, rotation = model.layers[0].train(), model.rotation(torch.arange(16)[None])
        scaling = DelayedScaling(layer, torch.device("cpu"))
        draw = torch.Generator().manual_seed(4)
        for parameter in layer.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
        weights = torch.linspace(-1.0, 1.0, x.numel()).view(x.shape)
        torch.autograd.grad(transformer_block(layer, x, rotation=rotation), x, weights)
        scaling.end_step(scaling.maxima(), torch.tensor(0.0))
        scaling.begin_step()
        if held:
            hold(layer, WeightCodes(scaling, weight_codes.encode_weights if kernels else plain_encode))
        block = coded_blocks.CodedKernels(layer) if kernels else PLAIN_BLOCK
        assert not kernels or (block._coded_mlp and block._coded_norms)
        out = transformer_block(layer, x, rotation=rotation, kernels=block)
        found.append([out, *torch.autograd.grad(out, [x, *layer.parameters()], weights), scaling.maxima()])
    for theirs, mine in zip(*found, strict=True):
        error, size = (torch.linalg.vector_norm(part.double()) for part in (mine - theirs, theirs))
        assert error <= 2.0**-10 * size, (error, size)  # a code in a thousand may be the next one


def main() -> None:
    torch.manual_seed(3)
    layers()
    layers(held=True)
    held_weights(80, 144)
    layers(**LLAMA | {"num_query_groups": 1})
    layers(held=True, swiglu=True, position_embedding_type="rope")
    for dtype, *shape in ((torch.float32, 1, 16), (torch.float32, 80, 144), (torch.bfloat16, 144, 272)):
        casts(*shape, dtype)
        if shape[0] > 1:
            gradients(shape[0], (shape[1],), dtype)
            gradients(shape[0], (shape[1], 48, 48), dtype)
    for dtype, gated in itertools.product((torch.float32, torch.float16), (False, True)):
        norms(1, 16, gated, True, dtype)
        norms(48, 272, gated, dtype == torch.float16, dtype)
        activations(16, 16, gated, True, dtype)
        activations(80, 144, gated, dtype == torch.float32, dtype)
    for dtype in (torch.float32, torch.float16):
        losses(16, 1008, 1001, dtype)
    losses(16, 10112, 10112, torch.float16)  # more columns than a program takes


if __name__ == "__main__":
    main()
