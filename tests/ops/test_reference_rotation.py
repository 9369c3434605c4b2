"""Rotated gradients against exact fractions, the Hadamard matrix in fp64, and averages over signs."""

import pytest
import torch
from torch import Tensor

from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.reference_rotation import (
    counters,
    encode_rotated,
    quantize_rotated,
    random_signs,
    rotate,
    rotate_back,
    sum_rotated,
)
from megatron_zpp.ops.signs import philox
from tests.ops.awkward import KINDS, awkward

SEED = -0x1234_5678_9ABC_DEF  # both key words in use


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def there_and_back(
    rows: Tensor, bits: int, block: int, seed: int = SEED, iteration: int = 5, first: int = 0
) -> Tensor:
    """The sum that a receiver has of rows (P, n)."""
    size = LloydMaxFormat(bits, block).message_bytes(rows.shape[1])
    messages = torch.full((len(rows), size), 165, dtype=torch.uint8)
    for row, message in zip(rows, messages, strict=True):
        quantize_rotated(row, message[None], bits, block, seed, 3, iteration, first)
    total = torch.empty(rows.shape[1])
    sum_rotated(messages, total, bits, block, seed, 3, iteration, first)
    return total


def normal(rows: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [32, 64, 128, 256, 512])
def test_rotation_is_the_hadamard_matrix(block: int) -> None:
    x = normal(3, block)
    signs = random_signs(counters(0, 3 * block, 1), SEED, 2)[: 3 * block].view(3, block)
    width = min(block, 256)
    expected = (x * signs).double().view(-1, width) @ hadamard(width)
    y = rotate(x, signs)
    assert torch.allclose(y.double().view(-1, width), expected, atol=2**-20)
    assert torch.allclose(rotate_back(y, signs), x, atol=2**-19)


def test_signs_are_bits_of_philox() -> None:
    first = 128 * (2**32 - 1)  # the second counter has a high word
    signs = random_signs(counters(first, 256, 9), SEED, 7)
    for e in (0, 31, 32, 127, 128, 200, 255):
        index = (first + e) // 128
        counter = tuple(torch.tensor([word]) for word in (index & 0xFFFFFFFF, index >> 32, 9, 7))
        word = philox(counter, (SEED & 0xFFFFFFFF, SEED >> 32 & 0xFFFFFFFF))[e % 128 // 32].item()
        assert signs[e].item() == (-1.0 if word >> (e % 32) & 1 else 1.0)
    many = random_signs(counters(0, 1 << 16, 0), 1, 0)
    assert abs(many.mean().item()) < 4 / 256  # four standard errors
    others = [random_signs(counters(0, 256, unit), seed, step) for seed, unit, step in ((1, 0, 1), (1, 1, 0))]
    assert all(not torch.equal(many[:256], other) for other in others)


@pytest.mark.parametrize(("bits", "error"), [(2, 0.40), (4, 0.105)])
@pytest.mark.parametrize("outlier", [0.0, 100.0])
def test_error_of_a_block_is_that_of_the_normal_distribution(bits: int, error: float, outlier: float) -> None:
    """Whatever the block looks like. ‖y‖² / ⟨y, c⟩ costs a little more than the levels' own error."""
    rows = normal(1, 256 * 64)
    if outlier:
        rows[:, ::256] = outlier
    left = there_and_back(rows, bits, 256) - rows[0]
    assert left.norm() / rows.norm() < error


def test_nearly_unbiased_over_signs() -> None:
    """The mean over signs comes nearer to the block as 1 / sqrt(count); with the least error it does not."""
    x = normal(1, 256, seed=4)
    means = {True: torch.zeros(256), False: torch.zeros(256)}
    count = 512
    for iteration in range(count):
        signs = random_signs(counters(0, 256, 0), 1, iteration).view(1, 256)
        for unbiased, mean in means.items():
            codes, stored = encode_rotated(rotate(x, signs), 2, unbiased=unbiased)
            levels = torch.tensor([-1.5104176, -0.45278004, 0.45278004, 1.5104176])[codes.int()]
            mean += rotate_back(levels * stored.float()[:, None], signs)[0] / count
    along = {unbiased: (mean @ x[0] / (x[0] @ x[0])).item() for unbiased, mean in means.items()}
    assert along[True] == pytest.approx(1.0, abs=2**-9)  # a bf16 scale is off by 2^-9 on average at most
    assert along[False] < 0.9  # 1 - Max's error of 0.1175
    assert (means[True] - x[0]).norm() / x.norm() < 0.02


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("block", [32, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_awkward_blocks(bits: int, block: int, dtype: torch.dtype) -> None:
    """Zeros arrive as zeros, and what is not finite as NaN in its own block. The largest fp32 numbers may
    overflow in a butterfly, and then something in the block is not finite either."""
    n = block * KINDS * 2
    x = awkward(1, n, block, dtype)[0]
    arrived = there_and_back(x[None], bits, block).view(-1, block)
    blocks = x.float().view(-1, block)
    largest = blocks.abs().amax(1)
    bad = ~blocks.isfinite().all(1)
    assert arrived[bad].isnan().all()
    assert not arrived[blocks.eq(0).all(1)].any()
    safe = ~bad & (largest < 1e36)
    assert arrived[safe].isfinite().all()
    coded = arrived.isfinite().all(1) & (largest > 1e-30)
    error = (arrived - blocks)[coded].double().norm(dim=1)
    assert (error < 0.6 * blocks[coded].double().norm(dim=1)).all()


def test_parts_of_a_unit_have_the_signs_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """So codes do not depend on the number of ranks, nor on tiles."""
    rows = normal(2, 1024)
    whole = there_and_back(rows, 4, 256)
    halves = [there_and_back(rows[:, at : at + 512], 4, 256, first=at) for at in (0, 512)]
    assert torch.equal(torch.cat(halves), whole)
    monkeypatch.setattr("megatron_zpp.ops.reference.TILE", 256)
    assert torch.equal(there_and_back(rows, 4, 256), whole)
    quantize_rotated(torch.zeros(0), torch.zeros(1, 0, dtype=torch.uint8), 4, 256, 0, 0, 0)
