"""A block's operations by Triton kernels, where these are faster than what torch.compile makes for GPUs."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.fused import linear as fused_linear
from megatron_zpp.model.fused import norm as fused_norm
from megatron_zpp.model.fused import rotary as fused_rotary
from megatron_zpp.model.fused import swiglu as fused_swiglu
from megatron_zpp.model.layer import MLP, Attention, BlockKernels, Layer, gelu, swiglu
from megatron_zpp.model.rotary import Rotation
from megatron_zpp.model.sublayers import CutLayer


class FusedKernels(BlockKernels):
    """Kernels for the modules of layers like `layer`; plain torch for modules that no kernel serves.

    The norms' kernels join the residual sum of one half with the norm of the other, which only a graph of a
    whole layer can do: cut layers have torch's norms.
    """

    def __init__(self, layer: Layer) -> None:
        attention, mlp = layer.attention, layer.mlp
        served = fused_norm.serves(layer.attention_norm) and fused_norm.serves(layer.mlp_norm)
        self._norms = served and not isinstance(layer, CutLayer)
        self._heads = fused_linear.serves(attention.qkv) and attention.groups == attention.heads
        self._rotates = not attention.normalized
        self._gelu = fused_linear.serves(mlp.input) and mlp.activation is gelu
        self._swiglu = mlp.activation is swiglu
        maps = attention.output, mlp.output, attention.qkv, mlp.input
        # Whether the gradients of the biases of `output` are made where that of the residual sum is.
        joins = self._norms and fused_norm.has_bias(layer.mlp_norm) and layer.dropout.p == 0
        self._sums_biases = joins and all(map(fused_linear.serves, maps))

    def norm(self, layer: Layer, x: Tensor) -> tuple[Any, Tensor]:
        """See BlockKernels."""
        if not self._norms:
            return super().norm(layer, x)
        return fused_norm.norm(x, layer.attention_norm)

    def add_norm(self, layer: Layer, x: Tensor, added: Tensor, residual: Tensor) -> tuple[Tensor, Any]:
        """See BlockKernels."""
        if not self._norms:
            return super().add_norm(layer, x, added, residual)
        biases = (layer.attention.output.bias, layer.mlp.output.bias) if self._sums_biases else ()
        return fused_norm.add_norm(x, added, residual, layer.mlp_norm, biases)

    def heads(self, attention: Attention, x: Any, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """See BlockKernels."""
        heads, groups, width = attention.heads, attention.groups, attention.head_width
        if self._rotates_heads(rotation):
            return fused_rotary.rotate_heads(attention.qkv(x), heads, groups, width, rotation)
        if not self._heads:
            return super().heads(attention, x, rotation)
        q, k, v = fused_linear.heads_of_linear(x, attention.qkv, heads, width)
        return rotation(attention.query_norm(q)), rotation(attention.key_norm(k)), v

    def activation(self, mlp: MLP, x: Tensor) -> Tensor:
        """See BlockKernels."""
        if self._swiglu:
            return fused_swiglu.swiglu(mlp.input(x))
        return fused_linear.gelu_of_linear(x, mlp.input) if self._gelu else super().activation(mlp, x)

    def project(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """See BlockKernels."""
        return F.linear(x, linear.weight, linear.bias.detach()) if self._sums_biases else linear(x)

    def _rotates_heads(self, rotation: Rotation) -> bool:
        """Whether one kernel splits and rotates heads."""
        return rotation.rotates and self._rotates
