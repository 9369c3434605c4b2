"""Weight differences against exact fractions and against the mathematics in fp64."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.lloyd_max import LEVELS, read_message
from megatron_zpp.ops.reference_difference import add_difference, quantize_difference
from tests.ops.awkward import KINDS, awkward
from tests.ops.scalar_oracle import fp32

BITS = (2, 4)


def sent(weights: Tensor, reference: Tensor, bits: int, block: int, skip: Tensor | None = None) -> Tensor:
    """The message, which is applied to `reference` as every rank does."""
    message = torch.full((LloydMaxFormat(bits, block).message_bytes(len(weights)),), 165, dtype=torch.uint8)
    quantize_difference(weights, reference, message, bits, block, skip)
    add_difference(message[None], reference, bits, block)
    return message


def levels(bits: int) -> list[float]:
    return [-level for level in reversed(LEVELS[bits])] + list(LEVELS[bits])


def close_pair(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights, and a reference that is near them."""
    generator = torch.Generator().manual_seed(seed)
    weights = 0.02 * torch.randn(n, generator=generator)
    return weights, weights + 1e-4 * torch.randn(n, generator=generator)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("block", [32, 256])
def test_against_the_mathematics(bits: int, block: int) -> None:
    """Codes are the nearest levels but where fp32 cannot tell; the new reference has one rounding of each
    operation, computed with fractions."""
    weights, reference = close_pair(4 * block, bits)
    old = reference.clone()
    codes, stored = read_message(
        sent(weights, reference, bits, block), 4 * block, LloydMaxFormat(bits, block)
    )
    table = torch.tensor(levels(bits), dtype=torch.float64)
    for k in range(4):
        here = slice(k * block, (k + 1) * block)
        difference = weights[here] - old[here]
        rms = difference.double().square().mean().sqrt()
        assert stored[k].double().item() == pytest.approx(rms.item(), rel=2**-8)
        distance = (difference.double()[:, None] / stored[k].double() - table).abs()
        chosen = distance.gather(1, codes[k].long()[:, None])[:, 0]
        assert (chosen <= distance.amin(1) + 1e-6).all()
        for w, code, now in zip(old[here].tolist(), codes[k].tolist(), reference[here].tolist(), strict=True):
            exact = Fraction(stored[k].item()) * Fraction(float(torch.tensor(levels(bits)[code])))
            assert Fraction(now) == fp32(Fraction(w) + fp32(exact))


@pytest.mark.parametrize("bits", BITS)
def test_receivers_hold_the_owners_bits(bits: int) -> None:
    """Awkward blocks included: a NaN or Inf makes its own block NaN, and no other."""
    block, n = 32, 32 * 2 * KINDS
    weights = awkward(1, n, block, torch.float32)[0]
    reference = awkward(1, n, block, torch.float32, seed=7)[0]
    reference[~reference.isfinite()] = 0.5
    receiver, half = reference.clone(), n // 2
    parts = [sent(weights[at], reference[at], bits, block) for at in (slice(half), slice(half, n))]
    add_difference(torch.stack(parts), receiver, bits, block)
    assert torch.equal(receiver.view(torch.int32), reference.view(torch.int32))
    bad = ~weights.view(-1, block).isfinite().all(1)
    assert torch.equal(receiver.view(-1, block).isnan().all(1), bad)
    assert bad.any()
    assert not receiver.view(-1, block)[~bad].isnan().any()


def test_blocks_of_equal_weights_stay_as_they_are() -> None:
    """Zero differences, and those too small for a scale, leave every bit, also of negative zeros."""
    for tiny in (0.0, 2.0**-140, 2.0**-127):
        reference = torch.full((64,), -0.0)
        message = sent(torch.full((64,), tiny), reference, 2, 64)
        assert not message.any()
        assert reference.view(torch.int32).eq(-(2**31)).all()


def test_one_huge_difference() -> None:
    """No overflow in the squares; the huge element moves by the outer level."""
    weights, reference = torch.zeros(256), torch.zeros(256)
    weights[7] = 3e38
    sent(weights, reference, 4, 256)
    scale = torch.tensor(3e38 / 16).bfloat16().float()
    assert reference[7] == scale * LEVELS[4][-1]
    assert reference[8] == scale * LEVELS[4][0]


@pytest.mark.parametrize(("bits", "left"), [(2, 0.36), (4, 0.11)])
def test_what_a_code_missed_is_sent_the_next_time(bits: int, left: float) -> None:
    """Every exchange leaves about the root of Max's error of a normal difference; the rest follows."""
    weights, reference = close_pair(256 * 64, bits)
    errors = [(weights - reference).square().mean().sqrt()]
    for _ in range(4):
        sent(weights, reference, bits, 256)
        errors.append((weights - reference).square().mean().sqrt())
    assert errors[1] / errors[0] < left
    assert errors[4] < 0.2 * errors[1]


@pytest.mark.parametrize("bits", BITS)
def test_squares_say_what_is_sent_and_what_is_lost(bits: int) -> None:
    weights, reference = close_pair(256 * 8, bits)
    message = torch.empty(LloydMaxFormat(bits, 256).message_bytes(256 * 8), dtype=torch.uint8)
    squares, before = torch.full((2, 8), 7.0), reference.clone()
    quantize_difference(weights, reference, message, bits, 256, squares=squares)
    assert torch.equal(reference, before)
    add_difference(message[None], reference, bits, 256)
    for found, known in zip(squares, (before, reference), strict=True):
        exact = (weights - known).double().square().view(8, -1).sum(1)
        assert found.double() == pytest.approx(exact, rel=1e-4)
    quantize_difference(weights, reference, message, bits, 256, torch.ones(()), squares)
    assert not squares.any()


def test_larger_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, reference = close_pair(1024, 5)
    in_tiles = reference.clone()
    whole = sent(weights, reference, 4, 256)
    monkeypatch.setattr("megatron_zpp.ops.reference.TILE", 512)
    assert torch.equal(sent(weights, in_tiles, 4, 256), whole)
    assert torch.equal(in_tiles, reference)
    assert len(sent(torch.empty(0), torch.empty(0), 4, 256)) == 0
