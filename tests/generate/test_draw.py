"""Which tokens are drawn, against transformers' own filters of logits."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_zpp.generate.draw import Sampling, draw, generator_of, uniforms

VOCABULARY = 50
SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.5, top_p=0.6),
    Sampling(temperature=0.9, top_k=20, top_p=0.8),
    Sampling(temperature=2.0, top_k=500, top_p=1.0),
]


def their_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    logits = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k > 0:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if 0 < sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return torch.softmax(logits, -1)[0]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_token_gets_its_share_of_the_uniform_numbers(sampling: Sampling) -> None:
    """Evenly spread numbers in place of random ones: counts are then the probabilities, to within one."""
    count = 4000
    logits = 2 * torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    evenly = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    found = draw(logits.expand(count, -1), sampling, evenly).bincount(minlength=VOCABULARY)
    expected = their_probabilities(logits, sampling)
    assert torch.all((found - expected * count).abs() <= 1.01)
    assert torch.all(found[expected == 0] == 0)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_ends_of_the_uniform_numbers_stay_inside(sampling: Sampling) -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(2))
    found = draw(logits, sampling, torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64))
    for row, token in enumerate(found):
        assert their_probabilities(logits[row : row + 1], sampling)[token] > 0


def test_temperature_0_or_next_to_it_takes_the_likeliest() -> None:
    logits = torch.randn(8, VOCABULARY)
    for temperature in (0.0, 1e-300):
        found = draw(logits, Sampling(temperature), torch.rand(8, dtype=torch.float64))
        assert torch.equal(found, logits.argmax(-1))


def test_numbers_follow_from_seed_prompt_and_copy() -> None:
    def numbers(*key: object) -> float:
        return uniforms([generator_of(*key)]).item()

    assert numbers(1, [2, 3], 0) == numbers(1, (2, 3), 0)
    others = [numbers(1, [2, 3], 1), numbers(2, [2, 3], 0), numbers(1, [23], 0), numbers(1, [], 0)]
    assert len({numbers(1, [2, 3], 0), *others}) == 5
