"""Sliding windows and scores, against transformers' documented recipe for perplexity in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.generate.scoring import Passage, score_passages, sliding_passages
from megatron_zpp.model.gpt import GPT
from tests.generate.models import TRAINED, as_transformers


def recipe(model: GPT, ids: list[int], width: int, stride: int) -> tuple[float, int]:
    """Negative log-likelihood and count of tokens by transformers' "Perplexity of fixed-length models".

    Its windows hold the targets too: they are one token longer than what the model sees.
    """
    theirs = as_transformers(model, positions=width + 1).double()
    previous, total, count = 0, 0.0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + width + 1, len(ids))
        inputs = torch.tensor([ids[begin:end]])
        targets = inputs.clone()
        targets[:, : end - begin - (end - previous)] = -100
        with torch.no_grad():
            loss = theirs(inputs, labels=targets).loss.item()
        scored = int((targets[:, 1:] != -100).sum())
        total, count = total + loss * scored, count + scored
        previous = end
        if end == len(ids):
            break
    return total, count


@pytest.mark.parametrize(("length", "stride"), [(2, 7), (TRAINED + 1, 1), (83, 7), (83, TRAINED)])
def test_as_transformers_recipe(model: GPT, length: int, stride: int) -> None:
    ids = torch.randint(200, (length,), generator=torch.Generator().manual_seed(4)).tolist()
    total, count = recipe(model, ids, TRAINED, stride)
    passages = sliding_passages(ids, TRAINED, stride)
    for batch_size in (1, 4):
        scores = list(score_passages(model, passages, batch_size))
        found = [value for score in scores for value in score.log_probabilities]
        assert len(found) == count == length - 1
        assert -math.fsum(found) == pytest.approx(total, rel=1e-5)


@given(length=st.integers(0, 200), width=st.integers(1, 40), stride=st.integers(1, 40))
def test_every_id_but_the_first_is_scored_once_in_order(length: int, width: int, stride: int) -> None:
    stride = min(stride, width)
    ids = list(range(length))
    passages = sliding_passages(ids, width, stride)
    scored = [id for passage in passages for id in passage.ids[len(passage.ids) - passage.scored :]]
    assert scored == ids[1:]
    for number, passage in enumerate(passages):
        assert 0 < passage.scored < len(passage.ids) <= width + 1
        assert number == 0 or len(passage.ids) - passage.scored > width - stride


def test_greedy_says_whether_all_scored_are_the_likeliest(model: GPT) -> None:
    ids = [5, 6, 7]
    for _ in range(4):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    wrong = [*ids[:-2], (ids[-2] + 1) % 200, ids[-1]]
    scores = score_passages(model, [Passage(ids, 4), Passage(wrong, 2), Passage(ids[:4], 1)], batch_size=3)
    assert [score.greedy for score in scores] == [True, False, True]
