"""The GPT's forward pass over a few new tokens, with the keys and values of those before them kept.

It uses the weights of a `GPT` and gives what its own forward gives, up to the rounding of sums. Texts of
unequal length end in the same column: a row begins where its padding ends, and nothing looks at padding.

Shapes: B rows, T new columns, C all columns until now, D hidden size, N heads, H head width, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.model.gpt import GPT, Attention


class Cache:
    """Keys and values of all layers, up to `columns` columns; row r begins in column `padding[r]`."""

    def __init__(self, model: GPT, padding: Sequence[int], columns: int) -> None:
        config, weight = model.config, model.embedding.tokens.weight
        shape = (len(padding), config.num_attention_heads, columns, config.kv_channels)
        self.layers = [
            (weight.new_empty(shape), weight.new_empty(shape)) for _ in range(config.num_layers)
        ]  # keys and values, each (B, N, columns, H)
        self.padding = torch.tensor(padding, device=weight.device)  # (B)
        self.padded = any(padding)
        self.columns, self.length = columns, 0

    def keep(self, rows: Sequence[int]) -> None:
        """Forgets all rows but these."""
        chosen = torch.tensor(rows, device=self.padding.device)
        self.layers = [(keys[chosen], values[chosen]) for keys, values in self.layers]
        self.padding = self.padding[chosen]


@torch.inference_mode()
def hidden_states(model: GPT, tokens: Tensor, cache: Cache) -> Tensor:
    """(B, T) ids, which go on where the cache ends -> what the head is to see of them, (B, T, D)."""
    first, last = cache.length, cache.length + tokens.shape[1]
    columns = torch.arange(first, last, device=tokens.device)  # (T)
    positions = (columns - cache.padding[:, None]).clamp(min=0)  # (B, T)
    mask = _mask(cache, first, last)
    x = model.embedding.tokens(tokens) + model.embedding.positions(positions)  # (B, T, D)
    for layer, kept in zip(model.layers, cache.layers, strict=True):
        x = x + _attend(layer.attention, layer.attention_norm(x), kept, first, mask)
        x = x + layer.mlp(layer.mlp_norm(x))
    cache.length = last
    return x


@torch.inference_mode()
def next_logits(model: GPT, tokens: Tensor, cache: Cache) -> Tensor:
    """(B, T) ids, which go on where the cache ends -> logits of what follows them, (B, V) fp32."""
    x = hidden_states(model, tokens, cache)[:, -1]  # (B, D)
    return model.head(x, model.embedding.tokens.weight)[:, : model.vocab_size].float()


def _mask(cache: Cache, first: int, last: int) -> Tensor | None:
    """Which columns each new one sees: (B, 1, T, C); None where all that are there, or all before it."""
    if not cache.padded and (first == 0 or last - first == 1):
        return None
    seen = torch.arange(last, device=cache.padding.device)  # (C)
    new = seen[first:, None]  # (T, 1)
    real = seen >= cache.padding[:, None, None]  # (B, 1, C)
    # A column of padding sees itself: a softmax over nothing would be NaN.
    return ((seen <= new) & real | (seen == new))[:, None]


def _attend(
    attention: Attention, x: Tensor, kept: tuple[Tensor, Tensor], first: int, mask: Tensor | None
) -> Tensor:
    """(B, T, D) -> (B, T, D); puts the new keys and values into what is kept."""
    last = first + x.shape[1]
    qkv = attention.qkv(x).unflatten(-1, (3, attention.heads, attention.head_width))  # (B, T, 3, N, H)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # each (B, N, T, H)
    keys, values = kept
    keys[:, :, first:last], values[:, :, first:last] = k, v
    mixed = F.scaled_dot_product_attention(
        q,
        keys[:, :, :last],
        values[:, :, :last],
        attn_mask=mask,
        is_causal=mask is None and x.shape[1] > 1,
    )
    return attention.output(mixed.transpose(1, 2).flatten(2))
