"""One transformer layer: attention and an MLP, each behind a norm, and the forward pass through them.

Shapes: B batch, T tokens, D hidden size, N query heads, G heads of keys and values (query groups), H head
width, C tokens in a cache, F inner width of the MLP. If tensor ranks share the model, then N, G and F are one
rank's parts.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.components import ModelComponents
from megatron_zpp.model.masks import CAUSAL, Mask
from megatron_zpp.model.rotary import UNROTATED, Rotation

if TYPE_CHECKING:
    from megatron_zpp.model.kv_cache import LayerCache


class Attention(nn.Module):
    """Causal self-attention with N query heads in G groups that share keys and values; G = N without groups.

    The rows of `qkv` are those of all queries, then of all keys, then of all values.
    """

    def __init__(self, config: ModelConfig, parts: ModelComponents, recompute_scores: bool) -> None:
        super().__init__()
        self.heads = config.num_attention_heads // parts.tensor_ranks
        self.groups = config.num_query_groups // parts.tensor_ranks
        self.head_width, self.dropout = config.kv_channels, config.attention_dropout
        self.recompute_scores, self.kernel = recompute_scores, parts.attention
        biased = not config.disable_bias_linear
        queries = config.num_attention_heads * config.kv_channels
        keys = config.num_query_groups * config.kv_channels
        self.qkv = parts.column(
            config.hidden_size,
            queries + 2 * keys,
            bias=biased or config.add_qkv_bias,
            runs=(queries, keys, keys),
        )
        self.normalized = config.qk_layernorm
        self.query_norm = parts.norm(config, self.head_width) if self.normalized else nn.Identity()
        self.key_norm = parts.norm(config, self.head_width) if self.normalized else nn.Identity()
        self.output = parts.row(queries, config.hidden_size, bias=biased)

    def forward(
        self, x: Tensor, mask: Mask, rotation: Rotation, cache: "LayerCache | None", kernels: "BlockKernels"
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); a `cache` comes with the mask CachedPrefix."""
        q, k, v = kernels.heads(self, x, rotation)  # (B, T, N, H), and twice (B, T, G, H)
        if cache is not None:
            k, v = cache.extend(k, v)  # each (B, C, G, H)
        dropout = self.dropout if self.training else 0.0
        attend = partial(self.kernel, dropout=dropout, mask=mask)
        if self.recompute_scores and self.training:
            mixed = checkpoint(attend, q, k, v, use_reentrant=False)
        else:
            mixed = attend(q, k, v)
        return kernels.project(self.output, mixed.flatten(2))  # of (B, T, N, H)


def gelu(x: Tensor) -> Tensor:
    """GPT-2's tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)² (Primer paper, 2109.08668)."""
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """(…, 2F) -> (…, F): SiLU of the first half times the second (GLU Variants paper, 2002.05202)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "squared_relu": squared_relu,
    "swiglu": swiglu,
}


class MLP(nn.Module):
    """Two linear maps with an activation between them; with SwiGLU the first makes gate and value."""

    def __init__(self, config: ModelConfig, parts: ModelComponents) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.activation]
        biased = not config.disable_bias_linear
        inner, outer = config.ffn_hidden_size, config.mlp_input_width
        self.input = parts.column(config.hidden_size, outer, bias=biased, runs=(inner,) * (outer // inner))
        self.output = parts.row(inner, config.hidden_size, bias=biased)

    def forward(self, x: Tensor, kernels: "BlockKernels") -> Tensor:
        """(B, T, D) -> (B, T, D) through (B, T, F)."""
        return kernels.mlp(self, x)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, parts: ModelComponents, recompute_scores: bool) -> None:
        super().__init__()
        self.attention_norm = parts.norm(config, config.hidden_size)
        self.attention = Attention(config, parts, recompute_scores)
        self.mlp_norm = parts.norm(config, config.hidden_size)
        self.mlp = MLP(config, parts)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.compute = transformer_block  # or a compiled one; hooks on this module stay outside of the graph

    def forward(
        self,
        x: Tensor,
        mask: Mask = CAUSAL,
        rotation: Rotation = UNROTATED,
        cache: "LayerCache | None" = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); generation passes a cache of keys and values, and its mask."""
        return self.compute(self, x, mask, rotation, cache)

    @property
    def compiled(self) -> bool:
        """Whether a graph computes the layer."""
        return self.compute is not transformer_block

    def units(self) -> tuple[nn.Module, ...]:
        """The modules whose parameters are gathered together, in the order of the forward pass."""
        return (self,)


class BlockKernels:
    """The operations of a block, in plain torch; model/fused/blocks.py replaces some by Triton kernels."""

    def norm(self, layer: Layer, x: Tensor) -> tuple[Any, Tensor]:
        """(B, T, D) -> the norm of x before attention, and what `add_norm` takes as `residual`.

        Norms are what `heads`, `activation` and `mlp` take: tensors, or codes of 8-bit products.
        """
        return layer.attention_norm(x), x

    def add_norm(self, layer: Layer, x: Tensor, added: Tensor, residual: Tensor) -> tuple[Tensor, Any]:
        """x + added and the norm before the MLP of this sum, each (B, T, D)."""
        x = x + added
        return x, layer.mlp_norm(x)

    def heads(self, attention: Attention, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) -> queries (B, T, N, H) and keys (B, T, G, H), normalised and rotated, and values."""
        heads, groups = attention.heads, attention.groups
        qkv = attention.qkv(x).unflatten(-1, (heads + 2 * groups, attention.head_width))
        q, k, v = qkv.split([heads, groups, groups], 2)
        if rotation.rotates and not attention.normalized and v.requires_grad:
            v = v.clone()  # a view would keep all of qkv for the backward, which needs nothing else of it
        return rotation(attention.query_norm(q)), rotation(attention.key_norm(k)), v

    def activation(self, mlp: MLP, x: Tensor) -> Tensor:
        """(B, T, D) -> the inner values of the MLP (B, T, F)."""
        return mlp.activation(mlp.input(x))

    def mlp(self, mlp: MLP, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.project(mlp.output, self.activation(mlp, x))

    def project(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """The linear map that ends attention or the MLP: (B, T, …) -> (B, T, D)."""
        return linear(x)


PLAIN_BLOCK = BlockKernels()


def transformer_block(
    layer: Layer,
    x: Tensor,
    mask: Mask = CAUSAL,
    rotation: Rotation = UNROTATED,
    cache: "LayerCache | None" = None,
    kernels: BlockKernels = PLAIN_BLOCK,
) -> Tensor:
    """The only forward pass of a whole layer, in training, compiled and with a cache.

    (B, T, D) -> (B, T, D).
    """
    normed, residual = kernels.norm(layer, x)
    mixed = layer.dropout(layer.attention(normed, mask, rotation, cache, kernels))
    x, normed = kernels.add_norm(layer, x, mixed, residual)
    return x + layer.dropout(layer.mlp(normed, kernels))
