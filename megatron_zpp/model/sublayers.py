"""A transformer layer whose two halves are units of their own (--zero-unit).

Shapes: B batch, T tokens, D hidden size.
"""

from torch import Tensor, nn

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.components import ModelComponents
from megatron_zpp.model.kv_cache import LayerCache
from megatron_zpp.model.layer import PLAIN_BLOCK, BlockKernels, Layer
from megatron_zpp.model.masks import CAUSAL, Mask
from megatron_zpp.model.rotary import UNROTATED, Rotation


class AttentionSublayer(nn.Module):
    """The half of a layer that computes x + attention(norm(x)); its modules are those of the layer."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.dropout = (
            layer.attention_norm,
            layer.attention,
            layer.dropout,
        )
        self.compute = attention_sublayer  # or a compiled one

    def forward(
        self,
        x: Tensor,
        mask: Mask = CAUSAL,
        rotation: Rotation = UNROTATED,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """See Layer."""
        return self.compute(self, x, mask, rotation, cache)


class MLPSublayer(nn.Module):
    """The half of a layer that computes x + mlp(norm(x)); its modules are those of the layer."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.mlp_norm, self.mlp, self.dropout = layer.mlp_norm, layer.mlp, layer.dropout
        self.compute = mlp_sublayer  # or a compiled one

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.compute(self, x)


class CutLayer(Layer):
    """A layer whose halves are units, with the parameters and names of a whole one.

    The halves are in a tuple, so that each of their modules has one name, the one in the layer.
    """

    def __init__(self, config: ModelConfig, parts: ModelComponents, recompute_scores: bool) -> None:
        super().__init__(config, parts, recompute_scores)
        self.sublayers = AttentionSublayer(self), MLPSublayer(self)

    def forward(
        self,
        x: Tensor,
        mask: Mask = CAUSAL,
        rotation: Rotation = UNROTATED,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """See Layer."""
        attention, mlp = self.sublayers
        return mlp(attention(x, mask, rotation, cache))

    @property
    def compiled(self) -> bool:
        """See Layer."""
        return self.sublayers[0].compute is not attention_sublayer

    def units(self) -> tuple[nn.Module, ...]:
        """See Layer."""
        return self.sublayers


def attention_sublayer(
    sublayer: AttentionSublayer,
    x: Tensor,
    mask: Mask = CAUSAL,
    rotation: Rotation = UNROTATED,
    cache: LayerCache | None = None,
    kernels: BlockKernels = PLAIN_BLOCK,
) -> Tensor:
    """The first half of `transformer_block`, with the same bits: (B, T, D) -> (B, T, D)."""
    mixed = sublayer.attention(sublayer.attention_norm(x), mask, rotation, cache, kernels)
    return x + sublayer.dropout(mixed)


def mlp_sublayer(sublayer: MLPSublayer, x: Tensor, kernels: BlockKernels = PLAIN_BLOCK) -> Tensor:
    """The second half of `transformer_block`, with the same bits: (B, T, D) -> (B, T, D)."""
    return x + sublayer.dropout(sublayer.mlp(sublayer.mlp_norm(x), kernels))
