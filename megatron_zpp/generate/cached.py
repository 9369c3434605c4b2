"""Generation's cache of keys and values, and the forward pass of a `GPT` over new tokens.

The layers are the model's own, which must be in eval mode. A row of the cache is a text; its first token lies
in column 0. Rows of any length lie side by side, and no token attends to another row or to columns beyond its
own.

Shapes: B rows, R new rows, T tokens of the longest new row, C columns up to the longest row's end, D hidden
size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.kv_cache import LayerCache, Place
from megatron_zpp.model.masks import CachedPrefix

_COLUMNS = 64  # storage grows by whole multiples of this


class Cache:
    """Keys and values of all layers; `lengths` are the tokens of each row."""

    def __init__(self, model: GPT, most_rows: int) -> None:
        config, weight = model.config, model.embedding.tokens.weight
        self.layers = [
            LayerCache(weight, config.num_query_groups, config.kv_channels) for _ in range(config.num_layers)
        ]
        self.lengths: list[int] = []
        self.device = weight.device
        self._most = most_rows, config.max_position_embeddings
        self._size = (0, 0)  # rows and columns of the storage

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Forget a row; the last row takes its number."""
        last = len(self.lengths) - 1
        for layer in self.layers:
            if row < last:
                layer.move(last, row)
            layer.clear(last)
        self.lengths[row] = self.lengths[last]
        del self.lengths[last]

    @torch.inference_mode()
    def place(self, place: Place) -> None:
        """Make room, and tell all layers where the next tokens go."""
        needed = place.rows.stop, place.end
        if needed[0] > self._size[0] or needed[1] > self._size[1]:
            rows, columns = (max(want, have) for want, have in zip(needed, self._size, strict=True))
            rows = rows if rows == self._size[0] else max(rows, min(2 * self._size[0], self._most[0]))
            if columns > self._size[1]:  # by a half at least: each token must not copy the texts
                columns = -(-max(columns, self._size[1] * 3 // 2) // _COLUMNS) * _COLUMNS
            self._resize((rows, max(place.end, min(columns, self._most[1]))))
        for layer in self.layers:
            layer.place = place

    def _resize(self, size: tuple[int, int]) -> None:
        self._size = size
        for layer in self.layers:
            layer.resize(*size)


@torch.inference_mode()
def prefill(model: GPT, cache: Cache, texts: Sequence[Sequence[int]]) -> Tensor:
    """Append a row for each text, of one id or more -> hidden states before the head, (R, T, D).

    Short texts are filled up at the end; what the filling computes means nothing.
    """
    longest = max(map(len, texts))
    filled = [[*text, *[0] * (longest - len(text))] for text in texts]
    positions = torch.arange(longest, device=cache.device)  # (T)
    masks: dict[int | None, CachedPrefix] = {}
    for window in set(model.windows):
        distance = positions[:, None] - positions
        near = None if window is None or longest <= window else (distance >= 0) & (distance < window)
        masks[window] = CachedPrefix(None if near is None else near[None, None])
    first = len(cache.lengths)
    cache.place(Place(slice(first, first + len(texts)), longest))
    ends = torch.tensor([[len(text) - 1] for text in texts], device=cache.device)  # (R, 1)
    own = positions.minimum(ends)  # (R, T); longrope asks how long a text is
    x = _hidden_states(model, cache, torch.tensor(filled, device=cache.device), own, masks)
    cache.lengths += map(len, texts)
    for row, text in enumerate(texts, first):
        if len(text) < longest:
            for layer in cache.layers:
                layer.clear(row, len(text), longest)
    return x


@torch.inference_mode()
def decode(model: GPT, cache: Cache, tokens: Sequence[int]) -> Tensor:
    """Append one id to every row -> its hidden state before the head, (B, D)."""
    end = max(cache.lengths) + 1
    even = min(cache.lengths) + 1 == end
    positions = torch.tensor(cache.lengths, device=cache.device)[:, None]  # (B, 1)
    columns = torch.arange(end, device=cache.device)  # (C)
    masks: dict[int | None, CachedPrefix] = {}
    for window in set(model.windows):
        if even and (window is None or end <= window):
            masks[window] = CachedPrefix()
            continue
        visible = columns <= positions  # (B, C)
        if window is not None:
            visible = visible & (columns > positions - window)
        masks[window] = CachedPrefix(visible[:, None, None])
    rows = slice(0, len(tokens))
    numbers = torch.arange(len(tokens), device=cache.device)[:, None]
    cache.place(Place(rows, end) if even else Place(rows, end, numbers, positions))
    ids = torch.tensor(tokens, device=cache.device)[:, None]  # (B, 1)
    x = _hidden_states(model, cache, ids, positions, masks)
    cache.lengths = [length + 1 for length in cache.lengths]
    return x[:, 0]


@torch.inference_mode()
def logits_of(model: GPT, x: Tensor) -> Tensor:
    """Hidden states (…, D) -> logits of the next token, (…, V) fp32."""
    return model.head(x, model.embedding.tokens.weight)[..., : model.vocab_size].float()


def _hidden_states(
    model: GPT, cache: Cache, tokens: Tensor, positions: Tensor, masks: dict[int | None, CachedPrefix]
) -> Tensor:
    x, rotations = model.embedding(tokens, positions), model.rotations(positions)
    for at, layer in enumerate(model.layers):
        x = layer(x, masks[model.windows[at]], rotations[at], cache.layers[at])
    return x
