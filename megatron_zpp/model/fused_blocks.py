"""A layer with kernels of ours where they are faster than what torch.compile makes, for graphs on GPUs."""

from torch import Tensor

from megatron_zpp.model import fused_linear, fused_norm
from megatron_zpp.model.gpt import MLP, Attention, Layer


def residual_blocks(layer: Layer, x: Tensor, bounds: Tensor | None) -> Tensor:
    """See gpt.residual_blocks."""
    if not (fused_norm.serves(layer.attention_norm) and fused_norm.serves(layer.mlp_norm)):
        x = x + layer.dropout(_attention(layer.attention, layer.attention_norm(x), bounds))
        return x + layer.dropout(_mlp(layer.mlp, layer.mlp_norm(x)))
    normed, token = fused_norm.norm(x, layer.attention_norm)
    mixed = layer.dropout(_attention(layer.attention, normed, bounds))
    x, normed = fused_norm.add_norm(x, mixed, token, layer.mlp_norm)
    return x + layer.dropout(_mlp(layer.mlp, normed))


def _attention(attention: Attention, x: Tensor, bounds: Tensor | None) -> Tensor:
    if not fused_linear.serves(attention.qkv):
        return attention(x, bounds)
    return attention.mix(
        *fused_linear.heads_of_linear(x, attention.qkv, attention.heads, attention.head_width), bounds
    )


def _mlp(mlp: MLP, x: Tensor) -> Tensor:
    return mlp.output(fused_linear.gelu_of_linear(x, mlp.input)) if fused_linear.serves(mlp.input) else mlp(x)
