"""Generation's cache of keys and values, and the forward pass of a `GPT` over new tokens.

The layers are the model's own, which must be in eval mode. A row of the cache is a text; its first token lies
in column 0. Rows of any length lie side by side, and no token attends to another row or to columns beyond its
own.

Shapes: B rows, T tokens of the longest row, C columns up to the longest row's end, G heads of keys and
values, H head width, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.masks import Mask

Masks: TypeAlias = dict[int | None, Mask]  # by the window of layers


class Cache:
    """Keys and values of all layers for `rows` texts of up to `columns` tokens.

    `lengths` are the tokens of each row. Before each forward pass the cache is told where the new tokens go:
    `end` is C, and `index` has the row (B, 1) and the column (B, T) of each token; None stands for the last T
    of the C columns in every row.
    """

    end = 0
    index: tuple[Tensor, Tensor] | None = None

    def __init__(self, model: GPT, rows: int, columns: int) -> None:
        config, weight = model.config, model.embedding.tokens.weight
        shape = rows, config.num_query_groups, columns, config.kv_channels  # as dot-product kernels read
        self._layers = [[weight.new_zeros(shape) for _ in range(2)] for _ in range(config.num_layers)]
        self.lengths = [0] * rows
        self.device = weight.device

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these, which are numbered anew."""
        for kept in self._layers:
            kept[:] = [each[rows] for each in kept]
        self.lengths = [self.lengths[row] for row in rows]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, T, G, H) of a layer; return those of all columns, views (B, C, G, H)."""
        for kept, new in zip(self._layers[layer], (k, v), strict=True):
            if self.index is None:
                kept[:, :, self.end - new.shape[1] : self.end] = new.transpose(1, 2)
            else:
                kept[self.index[0], :, self.index[1]] = new
        keys, values = (kept[:, :, : self.end].transpose(1, 2) for kept in self._layers[layer])
        return keys, values

    def clear(self, row: int, first: int, end: int) -> None:
        """Zero columns of a row, because a masked column still takes part in products: NaN · 0 is NaN."""
        for kept in self._layers:
            for each in kept:
                each[row, :, first:end] = 0


@torch.inference_mode()
def prefill(model: GPT, cache: Cache, texts: Sequence[Sequence[int]]) -> Tensor:
    """Fill the rows of a new cache with texts of one id or more -> hidden states before the head, (B, T, D).

    Short texts are filled up at the end; what the filling computes means nothing.
    """
    longest = max(map(len, texts))
    filled = [[*text, *[0] * (longest - len(text))] for text in texts]
    positions = torch.arange(longest, device=cache.device)  # (T)
    masks = _masks(model, positions[None, None, :, None], longest, even=True)
    cache.end, cache.index = longest, None
    ends = torch.tensor([[len(text) - 1] for text in texts], device=cache.device)  # (B, 1)
    own = positions.minimum(ends)  # (B, T); longrope asks how long a text is
    x = _hidden_states(model, cache, torch.tensor(filled, device=cache.device), own, masks)
    cache.lengths = [len(text) for text in texts]
    for row, length in enumerate(cache.lengths):
        cache.clear(row, length, longest)
    return x


@torch.inference_mode()
def decode(model: GPT, cache: Cache, tokens: Sequence[int]) -> Tensor:
    """Append one id to every row -> its hidden state before the head, (B, D)."""
    end = max(cache.lengths) + 1
    even = min(cache.lengths) + 1 == end
    positions = torch.tensor(cache.lengths, device=cache.device)[:, None]  # (B, 1)
    masks = _masks(model, positions[:, None, None], end, even=even)
    rows = torch.arange(len(tokens), device=cache.device)[:, None]  # (B, 1)
    cache.end, cache.index = end, None if even else (rows, positions)
    ids = torch.tensor(tokens, device=cache.device)[:, None]  # (B, 1)
    x = _hidden_states(model, cache, ids, positions, masks)
    cache.lengths = [length + 1 for length in cache.lengths]
    return x[:, 0]


@torch.inference_mode()
def logits_of(model: GPT, x: Tensor) -> Tensor:
    """Hidden states (…, D) -> logits of the next token, (…, V) fp32."""
    return model.head(x, model.embedding.tokens.weight)[..., : model.vocab_size].float()


def _masks(model: GPT, positions: Tensor, end: int, *, even: bool) -> Masks:
    """The masks of new tokens at `positions`, (1, 1, T, 1) or (B, 1, 1, 1), in a cache filled up to `end`.

    `even`: all rows end there, so that a window as long as they are cuts nothing.
    """
    columns = torch.arange(end, device=positions.device)  # (C)
    masks: Masks = {}
    for window in set(model.windows):
        masks[window] = Mask(cached=True)
        if not even or (window is not None and end > window):
            visible = columns <= positions  # (1, 1, T, C) or (B, 1, 1, C)
            if window is not None:
                visible = visible & (columns > positions - window)
            masks[window] = Mask(cached=True, bounds=visible)
    return masks


def _hidden_states(model: GPT, cache: Cache, tokens: Tensor, positions: Tensor, masks: Masks) -> Tensor:
    x, rotations = model.embedding(tokens, positions), model.rotations(positions)
    for at, layer in enumerate(model.layers):
        x = layer(x, masks[model.windows[at]], rotations[at], partial(cache.extend, at))
    return x
