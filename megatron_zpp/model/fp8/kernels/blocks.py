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


class CodedAttention(blocks.FusedAttention):
    """Attention whose input is codes, or whose gradients of heads become some."""

    qkv: DelayedLinear

    def mapped(self, x: Tensor | CodedInput) -> tuple[Tensor, ...]:
        if not isinstance(x, CodedInput):
            return super().mapped(x)
        return coded_heads.coded_heads(x, self.qkv, self.heads, self.groups, self.head_width)


class CodedMLP(blocks.FusedMLP):
    """An MLP whose activation makes codes."""

    def forward(self, x: Any) -> Tensor:
        return coded_mlp.coded_mlp(self, x) if torch.compiler.is_compiling() else super().forward(x)


class CodedHalf(blocks.FusedHalf):
    """A half whose norm before the part is codes."""

    def normalize(self, x: Tensor, norm: Any, *added: Tensor) -> tuple[Tensor, Any]:
        reader: Any = self.attention.qkv if self.part == "attention" else self.mlp.input
        return coded_norm.coded_norm(x, norm, reader, *added)


class CodedFirstHalf(CodedHalf, blocks.FusedFirstHalf):
    """The half of attention whose norm is codes."""


class CodedSecondHalf(CodedHalf, blocks.FusedSecondHalf):
    """The half of the MLP whose norm is codes."""


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
        if blocks.fuses_norms(layer):
            layer.halves[0].__class__, layer.halves[1].__class__ = CodedFirstHalf, CodedSecondHalf
