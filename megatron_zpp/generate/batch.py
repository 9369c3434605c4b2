"""The running batch: texts that are written together, and that begin and end independently of each other.

A text may join between any two tokens. Its prompt is computed in one forward pass over the texts that join
with it; from then on it takes part in the passes that give every text one more token.

Shapes: R texts of a forward pass, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.generate.cached import Cache, decode, logits_of, prefill
from megatron_zpp.generate.draw import Sampling, draw, uniforms
from megatron_zpp.generate.text import Continuation, TokenScore
from megatron_zpp.model.gpt import GPT

_PROMPT_TOKENS = 4096  # of prompts that are computed together, so that running texts do not wait long
_SCORED_TOKENS = 256  # whose logits are in memory at a time, to score prompts
NOT_FINITE = "the model gives logits that are not finite; its weights cannot be used"


class Batch:
    """Up to `size` texts. Not safe for use by several threads."""

    def __init__(self, model: GPT, size: int) -> None:
        self._model, self._size = model, size
        self._cache = Cache(model, size)
        self._rows: list[Continuation] = []  # in the order of the cache's rows
        self._joining: list[Continuation] = []

    @property
    def free(self) -> int:
        """How many texts could join."""
        return self._size - len(self)

    def __len__(self) -> int:
        return len(self._rows) + len(self._joining)

    @property
    def texts(self) -> list[Continuation]:
        """Those that have not ended."""
        return self._rows + self._joining

    def add(self, text: Continuation) -> None:
        """Let a text join at the next step."""
        assert self.free
        self._joining.append(text)

    def remove(self, text: Continuation) -> None:
        """Forget a text that has not ended."""
        if text in self._joining:
            self._joining.remove(text)
        else:
            self._forget(text)

    @torch.inference_mode()
    def step(self) -> list[Continuation]:
        """Give every running text a token, and texts that join their first; return the texts that changed.

        Those that have ended, or whose logits are not finite (`failure`), have left the batch.
        """
        positions = self._model.config.max_position_embeddings
        for text in [row for row, n in zip(self._rows, self._cache.lengths, strict=True) if n == positions]:
            # Each token's position changes with every new one, so that nothing cached is of use.
            self._forget(text)
            self._joining.append(text)
        changed = list(self._rows)
        if changed:
            x = decode(self._model, self._cache, [text.ids[-1] for text in changed])
            self._advance(changed, logits_of(self._model, x))
        joined = self._join(positions)
        for text in changed + joined:
            if text.ended:
                self._forget(text)
        return changed + joined

    def _join(self, positions: int) -> list[Continuation]:
        """Compute the prompts of the first texts that are joining, and their next tokens."""
        windows = [[*text.order.prompt, *text.ids][-positions:] for text in self._joining]
        count, longest = 0, 0
        for window in windows:
            longest = max(longest, len(window))
            if count and (count + 1) * longest > _PROMPT_TOKENS:
                break
            count += 1
        if not count:
            return []
        texts, windows, self._joining = self._joining[:count], windows[:count], self._joining[count:]
        self._rows += texts
        x = prefill(self._model, self._cache, windows)
        for index, (text, window) in enumerate(zip(texts, windows, strict=True)):
            if text.order.score_prompt and not text.prompt_scores:
                text.prompt_scores = self._prompt_scores(text, window, x[index])
        writing = [index for index, text in enumerate(texts) if not text.ended]
        if writing:
            ends = torch.tensor([len(windows[index]) - 1 for index in writing], device=x.device)
            last = x[torch.tensor(writing, device=x.device), ends]
            self._advance([texts[index] for index in writing], logits_of(self._model, last))
        return texts

    def _prompt_scores(self, text: Continuation, window: Sequence[int], x: Tensor) -> list[TokenScore]:
        """Return scores of all tokens of a prompt but the first, from hidden states (T, D)."""
        assert len(window) == len(text.order.prompt), "only prompts that fit the positions are scored"
        scores: list[TokenScore] = []
        for first in range(0, len(window) - 1, _SCORED_TOKENS):
            last = min(first + _SCORED_TOKENS, len(window) - 1)
            targets = torch.tensor(window[first + 1 : last + 1], device=x.device)
            logits = logits_of(self._model, x[first:last])
            if not torch.isfinite(logits).all():
                text.failure = NOT_FINITE
                return []
            scores += self._scores(logits, targets, [text.order.alternatives] * len(targets))
        return scores

    def _advance(self, texts: Sequence[Continuation], logits: Tensor) -> None:
        """Draw the next token of each text from logits (R, V)."""
        sound = torch.isfinite(logits).all(-1).tolist()
        if not all(sound):
            for text, good in zip(texts, sound, strict=True):
                text.failure = "" if good else NOT_FINITE
            texts = [text for text in texts if not text.failure]
            logits = logits[torch.tensor(sound, device=logits.device)]
            if not texts:
                return
        tokens = _draw(texts, logits[:, : self._model.entries])
        scores = self._scores(logits, tokens, [text.order.alternatives for text in texts])
        for text, token, score in zip(texts, tokens.tolist(), scores, strict=True):
            text.take(token, score)

    def _scores(self, logits: Tensor, tokens: Tensor, alternatives: Sequence[int]) -> list[TokenScore]:
        """Score tokens (R) by logits (R, V); `alternatives` says how many of the likeliest come with each."""
        values = torch.log_softmax(logits, -1)
        own = values.gather(-1, tokens[:, None])[:, 0].tolist()
        written = values[:, : self._model.entries]  # the other rows of a vocabulary have no text
        most = min(max(alternatives), written.shape[-1])
        if not most:
            return [TokenScore(value) for value in own]
        best = written.topk(most)
        pairs = [
            tuple(zip(ids, found, strict=True))
            for ids, found in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        return [
            TokenScore(value, pair[:count])
            for value, pair, count in zip(own, pairs, alternatives, strict=True)
        ]

    def _forget(self, text: Continuation) -> None:
        row = self._rows.index(text)
        self._cache.remove(row)
        self._rows[row] = self._rows[-1]
        del self._rows[-1]


def _draw(texts: Sequence[Continuation], logits: Tensor) -> Tensor:
    """Ids (R) from logits (R, V), each by the text's own sampling and random numbers."""
    numbers = uniforms([text.generator for text in texts])
    groups: dict[Sampling, list[int]] = {}
    for index, text in enumerate(texts):
        groups.setdefault(text.order.sampling, []).append(index)
    if len(groups) == 1:
        return draw(logits, texts[0].order.sampling, numbers)
    tokens = torch.empty(len(texts), dtype=torch.long, device=logits.device)
    for sampling, members in groups.items():
        chosen = torch.tensor(members, device=logits.device)
        tokens[chosen] = draw(logits[chosen], sampling, numbers[members])
    return tokens
