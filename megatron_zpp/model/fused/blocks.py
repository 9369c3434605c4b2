"""Modules of a layer with Triton kernels, where these are faster than what torch.compile makes for GPUs.

`fuse` gives the modules of a model these classes, whose parameters and names stay. The kernels run in graphs
alone: outside of one, where a text grows or scales are not known, a module computes what its base class does.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_zpp.model.fused import linear as fused_linear
from megatron_zpp.model.fused import norm as fused_norm
from megatron_zpp.model.fused import rotary as fused_rotary
from megatron_zpp.model.fused.gates import gated
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.layer import MLP, Attention, Half, Layer, geglu, gelu, swiglu
from megatron_zpp.model.rotary import Rotation


class Residual(NamedTuple):
    """What a half, or the first one and the second, adds to: x + added, which a norm's kernel sums.

    `token` is that of x's norm: x has its gradient through it.
    """

    x: Tensor
    token: Tensor
    added: Tensor | None = None
    bias: Tensor | None = None  # which is in `added`, and whose gradient the norm's kernel sums


class FusedAttention(Attention):
    """Attention whose kernels split and rotate heads, or join their gradients."""

    joins_heads: bool  # where heads are not rotated, with the gradient of the bias

    def split(self, x: Any, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        if torch.compiler.is_compiling() and rotation.rotates and not self.normalized:
            return fused_rotary.rotate_heads(self.qkv(x), self.heads, self.groups, self.head_width, rotation)
        return super().split(x, rotation)

    def mapped(self, x: Any) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling() and self.joins_heads:
            return fused_linear.heads_of_linear(x, self.qkv, self.heads, self.head_width)
        return super().mapped(x)


class FusedMLP(MLP):
    """An MLP whose kernels are the activation's."""

    follows_bias: bool  # whether the activation's kernel makes the gradient of the first bias

    def activate(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            if self.activation in (swiglu, geglu):
                return gated(self.input(x), self.activation is geglu)
            if self.follows_bias:
                return fused_linear.gelu_of_linear(x, self.input)
        return super().activate(x)


class FusedHalf(Half):
    """A half whose kernel makes the norm before the part, if there is one."""

    attention: FusedAttention
    mlp: FusedMLP

    def enter(self, x: Tensor) -> tuple[Tensor | Residual, Any]:
        before = getattr(self, f"{self.part}_norm")
        if not torch.compiler.is_compiling() or isinstance(before, nn.Identity):
            return super().enter(x)
        token, normed = self.normalize(x, before)
        return Residual(x, token), normed

    def normalize(self, x: Tensor, norm: Any, *added: Tensor) -> tuple[Tensor, Any]:
        """See fused/norm.norm."""
        return fused_norm.norm(x, norm, *added)


class FusedFirstHalf(FusedHalf):
    """The half of attention in the graph of a whole layer; its residual sum is left to the other half."""

    def leave(self, x: Tensor | Residual, made: Tensor) -> Tensor | Residual:
        if not isinstance(x, Residual):
            return super().leave(x, made)
        output = self.attention.output
        sums_bias = isinstance(output, fused_linear.LinearIntoSum)
        return x._replace(added=self.added(made), bias=output.bias if sums_bias else None)


class FusedSecondHalf(FusedHalf):
    """The half of the MLP in the graph of a whole layer, whose norm's kernel makes the residual sum too."""

    mlp_norm: Any

    def enter(self, x: Tensor | Residual) -> tuple[Any, Any]:
        if not isinstance(x, Residual):
            return super().enter(x)
        assert x.added is not None
        biases = () if x.bias is None else (x.bias, self.mlp.output.bias)
        return self.normalize(x.x, self.mlp_norm, x.added, x.token, *biases)


class NormedHalf(FusedHalf):
    """A half with a norm of what it has made, whose kernel makes the residual sum too."""

    def leave(self, x: Tensor | Residual, made: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().leave(x, made)
        x, token = (x.x, x.token) if isinstance(x, Residual) else (x, None)
        return fused_norm.add_normed(x, made, token, getattr(self, f"{self.part}_output_norm"))


def fuse(model: GPT) -> None:
    """Give kernels to the modules of a model; plain torch stays where no kernel serves.

    Where halves add what they make without a norm, the norms' kernels join the residual sum of one half with
    the norm of the other, which only a graph of a whole layer can do: such layers in halves have torch's.
    """
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        attention.__class__, mlp.__class__ = FusedAttention, FusedMLP
        assert isinstance(attention, FusedAttention)
        assert isinstance(mlp, FusedMLP)
        attention.joins_heads = fused_linear.serves(attention.qkv) and attention.groups == attention.heads
        mlp.follows_bias = fused_linear.serves(mlp.input) and mlp.activation is gelu
        if _norms_outputs(layer):
            for half in layer.halves:
                half.__class__ = NormedHalf
            continue
        norms = fuses_norms(layer)
        maps = attention.output, mlp.output, attention.qkv, mlp.input
        # Whether the output of attention is added to the residual stream as it is.
        as_made = isinstance(layer.attention_output_norm, nn.Identity) and layer.dropout.p == 0
        as_made = as_made and layer.halves[0].multiplier == 1
        joins = norms and isinstance(layer.mlp_norm, nn.LayerNorm) and as_made
        if joins and all(map(fused_linear.serves, maps)):  # kernels of a LayerNorm sum gradients of biases
            attention.output.__class__ = mlp.output.__class__ = fused_linear.LinearIntoSum
        if norms:
            layer.halves[0].__class__, layer.halves[1].__class__ = FusedFirstHalf, FusedSecondHalf


def _norms_outputs(layer: Layer) -> bool:
    """Whether halves add norms of what they make to the residual stream, and kernels serve all norms."""
    after = (layer.attention_output_norm, layer.mlp_output_norm)
    before = [norm for norm in (layer.attention_norm, layer.mlp_norm) if not isinstance(norm, nn.Identity)]
    plain = all(type(half) is Half and half.multiplier == 1 for half in layer.halves) and layer.dropout.p == 0
    return plain and all(map(fused_norm.serves, (*after, *before)))


def fuses_norms(layer: Layer) -> bool:
    """Whether kernels serve the norms of a layer."""
    return not layer.in_halves and all(map(fused_norm.serves, (layer.attention_norm, layer.mlp_norm)))
