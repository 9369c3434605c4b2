"""Log-probabilities of given tokens, on which every evaluation rests.

Shapes: B passages, T tokens of the longest one but its last, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from megatron_zpp.model.gpt import GPT


class Passage(NamedTuple):
    """Ids, of which the last `scored` ones get a score; the model sees the ids before them."""

    ids: Sequence[int]
    scored: int


class Score(NamedTuple):
    """The log-probability of each scored id, and whether each is the model's likeliest."""

    log_probabilities: list[float]
    greedy: bool


def score_passages(
    model: GPT,
    passages: Sequence[Passage],
    batch_size: int,
    before_batch: Callable[[], None] = lambda: None,
) -> Iterator[Score]:
    """A score for each passage; these must have one id more than is scored, and fit the model's positions."""
    for first in range(0, len(passages), batch_size):
        before_batch()
        yield from _score_batch(model, passages[first : first + batch_size])


@torch.inference_mode()
def _score_batch(model: GPT, passages: Sequence[Passage]) -> list[Score]:
    device = model.embedding.tokens.weight.device
    longest = max(len(passage.ids) for passage in passages) - 1
    # Attention looks only backwards, so what fills the ends of short rows changes nothing.
    filled = [[*passage.ids[:-1], *[0] * (longest + 1 - len(passage.ids))] for passage in passages]
    ends = torch.tensor([[max(len(passage.ids) - 2, 0)] for passage in passages], device=device)  # (B, 1)
    positions = torch.arange(longest, device=device).minimum(ends)  # (B, T); of a text's own length
    logits = model(torch.tensor(filled, device=device), positions=positions)  # (B, T, V)
    scores = []
    for row, (ids, scored) in zip(logits, passages, strict=True):
        end = len(ids) - 1
        targets = torch.tensor(ids[len(ids) - scored :], device=device)  # (scored)
        asked = row[end - scored : end].float()  # (scored, V)
        found = torch.log_softmax(asked, -1).gather(-1, targets[:, None])[:, 0]
        scores.append(Score(found.tolist(), bool((asked.argmax(-1) == targets).all())))
    return scores


def sliding_passages(ids: Sequence[int], width: int, stride: int, given: int = 1) -> list[Passage]:
    """Passages that score every id but the first `given` exactly once, with up to `width` ids before it.

    Each begins `stride` ids after the one before and scores what that one did not reach, so all but the first
    score `stride` ids with at least `width - stride` before them. `stride` is from 1 to `width`.
    """
    passages, reached = [], given
    for begin in range(0, len(ids) - 1, stride):
        end = min(begin + width + 1, len(ids))
        passages.append(Passage(ids[begin:end], end - reached))
        reached = end
        if end == len(ids):
            break
    return passages
