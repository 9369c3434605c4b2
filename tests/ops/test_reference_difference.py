"""Weight differences against exact fractions and against the mathematics in fp64."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.lloyd_max import LEVELS, read_message
from megatron_zpp.ops.reference_difference import add_difference, quantize_difference
from tests.ops.test_scalar_oracle import fp32

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


def test_larger_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, reference = close_pair(1024, 5)
    in_tiles = reference.clone()
    whole = sent(weights, reference, 4, 256)
    monkeypatch.setattr("megatron_zpp.ops.reference.TILE", 512)
    assert torch.equal(sent(weights, in_tiles, 4, 256), whole)
    assert torch.equal(in_tiles, reference)
    assert len(sent(torch.empty(0), torch.empty(0), 4, 256)) == 0
