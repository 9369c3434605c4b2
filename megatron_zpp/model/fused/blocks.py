"""A layer with kernels of ours where they are faster than what torch.compile makes, for graphs on GPUs."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.fused import linear as fused_linear
from megatron_zpp.model.fused import norm as fused_norm
from megatron_zpp.model.gpt import MLP, Attention, Layer


def residual_blocks(layer: Layer, x: Tensor, bounds: Tensor | None) -> Tensor:
    """See gpt.residual_blocks."""
    if not (fused_norm.serves(layer.attention_norm) and fused_norm.serves(layer.mlp_norm)):
        x = x + layer.dropout(_attention(layer.attention, layer.attention_norm(x), bounds))
        return x + layer.dropout(_mlp(layer.mlp, layer.mlp_norm(x)))
    maps = layer.attention.output, layer.mlp.output, layer.attention.qkv, layer.mlp.input
    apart = layer.dropout.p == 0 and all(map(fused_linear.serves, maps))
    normed, token = fused_norm.norm(x, layer.attention_norm)
    mixed = layer.dropout(_attention(layer.attention, normed, bounds, apart))
    biases = (layer.attention.output.bias, layer.mlp.output.bias) if apart else ()
    x, normed = fused_norm.add_norm(x, mixed, token, layer.mlp_norm, biases)
    return x + layer.dropout(_mlp(layer.mlp, normed, apart))


# `apart`: the gradient of the bias of `output` is made where that of the sum is.


def _attention(attention: Attention, x: Tensor, bounds: Tensor | None, apart: bool = False) -> Tensor:
    if not fused_linear.serves(attention.qkv):
        return attention(x, bounds)
    q, k, v = fused_linear.heads_of_linear(x, attention.qkv, attention.heads, attention.head_width)
    return _map(attention.output, attention.mix(q, k, v, bounds), apart)


def _mlp(mlp: MLP, x: Tensor, apart: bool = False) -> Tensor:
    if not fused_linear.serves(mlp.input):
        return mlp(x)
    return _map(mlp.output, fused_linear.gelu_of_linear(x, mlp.input), apart)


def _map(linear: nn.Linear, x: Tensor, apart: bool) -> Tensor:
    return F.linear(x, linear.weight, linear.bias.detach()) if apart else linear(x)
