"""Generation's cache of keys and values, and the forward pass of a `GPT` over a few new tokens.

The layers are the model's own, which must be in eval mode. Texts of unequal length end in the same column: a
row begins where its padding ends, and no token attends to padding.

Shapes: B rows, T new columns, C all columns until now, D hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.kv_cache import LayerCache
from megatron_zpp.model.masks import CachedPrefix


class Cache:
    """Keys and values of all layers, up to `columns` columns; row r begins in column `padding[r]`."""

    def __init__(self, model: GPT, padding: Sequence[int], columns: int) -> None:
        config, weight = model.config, model.embedding.tokens.weight
        self.layers = [
            LayerCache(weight, len(padding), columns, config.num_query_groups, config.kv_channels)
            for _ in range(config.num_layers)
        ]
        self.padding = torch.tensor(padding, device=weight.device)  # (B)
        self.padded = any(padding)
        self.columns, self.length = columns, 0

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these."""
        chosen = torch.tensor(rows, device=self.padding.device)
        for layer in self.layers:
            layer.keep(chosen)
        self.padding = self.padding[chosen]


@torch.inference_mode()
def hidden_states(model: GPT, tokens: Tensor, cache: Cache) -> Tensor:
    """(B, T) ids that follow the columns of the cache -> their hidden states before the head, (B, T, D)."""
    first, last = cache.length, cache.length + tokens.shape[1]
    columns = torch.arange(first, last, device=tokens.device)  # (T)
    positions = (columns - cache.padding[:, None]).clamp(min=0)  # (B, T)
    mask = CachedPrefix(_visible(cache, first, last))
    x, rotation = model.embedding(tokens, positions), model.rotation(positions)  # (B, T, D)
    for layer, kept in zip(model.layers, cache.layers, strict=True):
        x = layer(x, mask, rotation, kept)
    cache.length = last
    return x


@torch.inference_mode()
def next_logits(model: GPT, tokens: Tensor, cache: Cache) -> Tensor:
    """(B, T) ids that follow the columns of the cache -> logits of the next token, (B, V) fp32."""
    x = hidden_states(model, tokens, cache)[:, -1]  # (B, D)
    return model.head(x, model.embedding.tokens.weight)[:, : model.vocab_size].float()


def _visible(cache: Cache, first: int, last: int) -> Tensor | None:
    """Return the columns that each new one attends to (B, 1, T, C); None stands for all before it."""
    if not cache.padded and (first == 0 or last - first == 1):
        return None
    seen = torch.arange(last, device=cache.padding.device)  # (C)
    new = seen[first:, None]  # (T, 1)
    real = seen >= cache.padding[:, None, None]  # (B, 1, C)
    # A column of padding sees itself: a softmax over nothing would be NaN.
    return ((seen <= new) & real | (seen == new))[:, None]
