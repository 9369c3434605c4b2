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
from megatron_zpp.generate.text import Continuation
from megatron_zpp.model.gpt import GPT

_PROMPT_TOKENS = 4096  # of prompts that are computed together: a bound on the memory of that pass


class Batch:
    """Up to `size` texts, drawn in one way."""

    def __init__(self, model: GPT, size: int, sampling: Sampling) -> None:
        self._model, self._size, self._sampling = model, size, sampling
        self._cache = Cache(model, size)
        self._rows: list[Continuation] = []  # in the order of the cache's rows
        self._joining: list[Continuation] = []

    @property
    def free(self) -> int:
        """How many texts could join."""
        return self._size - len(self._rows) - len(self._joining)

    def add(self, text: Continuation) -> None:
        """Let a text that has not ended join at the next step."""
        assert self.free
        assert not text.ended
        self._joining.append(text)

    @torch.inference_mode()
    def step(self) -> None:
        """Give every running text a token, and texts that join their first; those that end leave the batch.

        Raises ValueError if the model's logits are not finite.
        """
        config = self._model.config
        positions = config.max_position_embeddings
        stale = positions, config.longrope_limit
        for text in [row for row, n in zip(self._rows, self._cache.lengths, strict=True) if n in stale]:
            # Each token's position changes with every new one, or how it is rotated: the cache is of no use.
            self._forget(text)
            self._joining.append(text)
        changed = list(self._rows)
        if changed:
            x = decode(self._model, self._cache, [text.ids[-1] for text in changed])
            self._advance(changed, logits_of(self._model, x))
        for text in changed + self._join(positions):
            if text.ended:
                self._forget(text)

    def _join(self, positions: int) -> list[Continuation]:
        """Compute the prompts of the first texts that are joining, and their next tokens."""
        windows = [[*text.prompt, *text.ids][-positions:] for text in self._joining]
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
        ends = torch.tensor([len(window) - 1 for window in windows], device=x.device)
        last = x[torch.arange(count, device=x.device), ends]
        self._advance(texts, logits_of(self._model, last))
        return texts

    def _advance(self, texts: Sequence[Continuation], logits: Tensor) -> None:
        """Draw the next token of each text from logits (R, V)."""
        if not torch.isfinite(logits).all():
            raise ValueError("the model gives logits that are not finite; its weights cannot be used")
        written = logits[:, : self._model.entries]  # the other rows of a vocabulary have no text
        tokens = draw(written, self._sampling, uniforms([text.generator for text in texts]))
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.take(token)

    def _forget(self, text: Continuation) -> None:
        row = self._rows.index(text)
        self._cache.remove(row)
        self._rows[row] = self._rows[-1]
        del self._rows[-1]
