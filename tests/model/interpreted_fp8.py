"""A program: the Triton kernels of 8-bit casts by Triton's interpreter, on CPUs: every bit of the oracle's.

It wants TRITON_INTERPRET=1, as tests/model/interpreted.py does.
"""

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_zpp.model.fp8_cast import FORMATS, GRADIENT, INPUT, LARGEST, WEIGHT, plain_cast
from megatron_zpp.model.fused import cast as fused_cast

fused_cast.wrap_triton = lambda kernel: kernel


@triton.jit
def rounded(x, FORMAT: tl.constexpr):
    """What GPUs have an instruction for; the interpreter's own conversion breaks ties and NaN otherwise."""
    FRACTION: tl.constexpr = 2 if tl.float8e5 == FORMAT else 3  # bits
    BIAS: tl.constexpr = 15 if tl.float8e5 == FORMAT else 7
    size = tl.abs(x)
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


fused_cast.rounded = rounded


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
    return x.to(dtype), torch.stack((scale, scale.reciprocal()))


def casts(rows: int, width: int, dtype: torch.dtype) -> None:
    layouts = [(True, True), (True, False), (False, True)]
    for kind, (by_rows, by_columns) in itertools.product((INPUT, WEIGHT, GRADIENT), layouts):
        x, factors = awkward(rows, width, kind, dtype)
        for before in (0.0, 1e30):
            found, expected = (torch.full((3,), before) for _ in range(2))
            mine = fused_cast.cast(x, factors, found, kind, rows=by_rows, columns=by_columns)
            theirs = plain_cast(x, factors, expected, kind, rows=by_rows, columns=by_columns)
            for ours, oracle in zip(mine, theirs, strict=True):
                same_codes(ours, oracle)
            assert torch.equal(found, expected)


def main() -> None:
    torch.manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((1, 16), (16, 16), (80, 144), (192, 272)):
            casts(*shape, dtype)


if __name__ == "__main__":
    main()
