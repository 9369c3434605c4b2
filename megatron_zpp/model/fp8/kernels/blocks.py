"""Modules of a layer with Triton kernels that hand codes of 8-bit floats on to products with delayed scaling.

See model/fused/blocks.py.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_zpp.model.fp8.delayed import CodedInput, DelayedLinear
from megatron_zpp.model.fp8.kernels import coded_heads, coded_mlp, coded_norm
from megatron_zpp.model.fused import blocks
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.rotary import Rotation


class CodedAttention(blocks.FusedAttention):
    """Attention whose input is codes, or whose gradients of heads become some."""

    qkv: DelayedLinear

    def split(self, x: Tensor | CodedInput, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        if self.rotates(rotation) or not isinstance(x, CodedInput):
            return super().split(x, rotation)
        q, k, v = coded_heads.coded_heads(x, self.qkv, self.heads, self.groups, self.head_width)
        return rotation(self.normalize(q, self.query_norm)), rotation(self.normalize(k, self.key_norm)), v


class CodedMLP(blocks.FusedMLP):
    """An MLP whose activation makes codes."""

    def forward(self, x: Any) -> Tensor:
        return coded_mlp.coded_mlp(self, x) if torch.compiler.is_compiling() else super().forward(x)


class CodedNormedHalf(blocks.NormedHalf):
    """A half with a norm of what it has made, whose norm before the part is codes."""

    attention: CodedAttention
    mlp: blocks.FusedMLP

    def normalize(self, x: Tensor, norm: Any) -> tuple[Any, Tensor]:
        reader: Any = self.attention.qkv if self.part == "attention" else self.mlp.input
        return coded_norm.coded_norm(x, norm, reader)


class CodedFirstHalf(blocks.FusedFirstHalf):
    """The half of attention whose norm is codes."""

    attention: CodedAttention

    def enter(self, x: Tensor) -> tuple[Tensor | blocks.Residual, Any]:
        if not torch.compiler.is_compiling():
            return super().enter(x)
        normed, token = coded_norm.coded_norm(x, self.attention_norm, self.attention.qkv)
        return blocks.Residual(x, token), normed


class CodedSecondHalf(blocks.FusedSecondHalf):
    """The half of the MLP whose norm is codes."""

    def enter(self, x: Tensor | blocks.Residual) -> tuple[Tensor, Any]:
        if not isinstance(x, blocks.Residual):
            return super().enter(x)
        first = self.mlp.input
        assert x.added is not None
        assert isinstance(first, DelayedLinear)
        return coded_norm.coded_add_norm(x.x, x.added, x.token, self.mlp_norm, first)


def fuse(model: GPT) -> None:
    """Give kernels to the modules of a model whose products have delayed scaling."""
    blocks.fuse(model)
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        if coded_mlp.serves(mlp):
            mlp.__class__ = CodedMLP
        if not all(type(reader) is DelayedLinear for reader in (attention.qkv, mlp.input)):
            continue
        attention.__class__ = CodedAttention
        if blocks.norms_outputs(layer):
            for half in layer.halves:
                half.__class__ = CodedNormedHalf
        elif blocks.fuses_norms(layer):
            layer.halves[0].__class__, layer.halves[1].__class__ = CodedFirstHalf, CodedSecondHalf
