"""A block's operations by Triton kernels where the products of its layer take codes of 8-bit floats."""

from typing import Any

from torch import Tensor

from megatron_zpp.model.fp8.delayed import CodedInput, DelayedLinear
from megatron_zpp.model.fp8.kernels import coded_heads, coded_mlp, coded_norm
from megatron_zpp.model.fused.blocks import FusedKernels
from megatron_zpp.model.layer import MLP, Attention, Layer
from megatron_zpp.model.rotary import Rotation


class CodedKernels(FusedKernels):
    """Kernels that hand codes on to products with delayed scaling."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self._coded_mlp = coded_mlp.serves(layer.mlp)
        readers = layer.attention.qkv, layer.mlp.input
        self._coded_norms = self._norms and all(type(reader) is DelayedLinear for reader in readers)

    def norm(self, layer: Layer, x: Tensor) -> tuple[Any, Tensor]:
        """See BlockKernels."""
        if not self._coded_norms:
            return super().norm(layer, x)
        qkv = layer.attention.qkv
        assert isinstance(qkv, DelayedLinear)
        return coded_norm.coded_norm(x, layer.attention_norm, qkv)

    def add_norm(self, layer: Layer, x: Tensor, added: Tensor, residual: Tensor) -> tuple[Tensor, Any]:
        """See BlockKernels."""
        if not self._coded_norms:
            return super().add_norm(layer, x, added, residual)
        first = layer.mlp.input
        assert isinstance(first, DelayedLinear)
        return coded_norm.coded_add_norm(x, added, residual, layer.mlp_norm, first)

    def heads(
        self, attention: Attention, x: Tensor | CodedInput, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See BlockKernels."""
        if self._rotates_heads(rotation) or not isinstance(x, CodedInput):
            return super().heads(attention, x, rotation)
        heads, groups, width = attention.heads, attention.groups, attention.head_width
        assert isinstance(attention.qkv, DelayedLinear)
        q, k, v = coded_heads.coded_heads(x, attention.qkv, heads, groups, width)
        return rotation(attention.query_norm(q)), rotation(attention.key_norm(k)), v

    def mlp(self, mlp: MLP, x: Tensor) -> Tensor:
        """See BlockKernels."""
        return coded_mlp.coded_mlp(mlp, x) if self._coded_mlp else super().mlp(mlp, x)
