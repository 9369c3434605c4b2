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

SEED = -0x1234_5678_9ABC_DEF  # both key words in use


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
    """The mean over signs comes nearer to the block as 1 / sqrt(count)."""
    x, mean = normal(1, 256, seed=4), torch.zeros(256)
    count = 512
    for iteration in range(count):
        signs = random_signs(counters(0, 256, 0), 1, iteration).view(1, 256)
        codes, stored = encode_rotated(rotate(x, signs), 2)
        levels = torch.tensor([-1.5104176, -0.45278004, 0.45278004, 1.5104176])[codes.int()]
        mean += rotate_back(levels * stored.float()[:, None], signs)[0] / count
    along = (mean @ x[0] / (x[0] @ x[0])).item()
    assert along == pytest.approx(1.0, abs=2**-9)  # a bf16 scale is off by 2^-9 on average at most
    assert (mean - x[0]).norm() / x.norm() < 0.02


def test_what_codes_lose_and_what_arrives_is_what_was_sent() -> None:
    """With what was owed before, times the divisor, but for bf16's rounding of what is kept."""
    rows, owed, divisor = normal(1, 1024), normal(1, 1024, seed=1).bfloat16(), torch.tensor(8.0)
    message = torch.zeros(1, LloydMaxFormat(4, 256).message_bytes(1024), dtype=torch.uint8)
    lost, arrived = owed.clone(), torch.empty(1024)
    quantize_rotated(rows[0], message, 4, 256, SEED, 3, 5, 0, lost, divisor)
    sum_rotated(message, arrived, 4, 256, SEED, 3, 5, 0)
    missing = rows[0].double() + 8 * owed[0].double() - arrived
    assert (missing - 8 * lost[0].double()).norm() < 2**-8 * missing.norm()
    assert missing.norm() > 0.05 * arrived.norm()


def test_parts_of_a_unit_have_the_signs_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """So codes do not depend on the number of ranks, nor on tiles."""
    rows = normal(2, 1024)
    whole = there_and_back(rows, 4, 256)
    halves = [there_and_back(rows[:, at : at + 512], 4, 256, first=at) for at in (0, 512)]
    assert torch.equal(torch.cat(halves), whole)
    monkeypatch.setattr("megatron_zpp.ops.reference.TILE", 256)
    assert torch.equal(there_and_back(rows, 4, 256), whole)
    quantize_rotated(torch.zeros(0), torch.zeros(1, 0, dtype=torch.uint8), 4, 256, 0, 0, 0)
