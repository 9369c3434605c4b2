"""Sliding windows and scores; tests/commands/test_evaluate.py has perplexity in float64."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.generate.scoring import Passage, score_passages, sliding_passages
from megatron_zpp.model.gpt import GPT


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
    wrong = [*ids[:-1], (ids[-1] + 1) % 200]
    scores = score_passages(model, [Passage(ids, 4), Passage(wrong, 2), Passage(ids[:4], 1)], batch_size=3)
    assert [score.greedy for score in scores] == [True, False, True]
