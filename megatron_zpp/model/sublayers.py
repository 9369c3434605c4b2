"""A transformer layer whose two halves are units of their own (--zero-unit).

Shapes: B batch, T tokens, D hidden size.
"""

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.components import ModelComponents
from megatron_zpp.model.layer import PLAIN_BLOCK, BlockKernels, Layer
from megatron_zpp.model.masks import CAUSAL, Mask
from megatron_zpp.model.rotary import UNROTATED, Rotation

if TYPE_CHECKING:
    from megatron_zpp.model.kv_cache import LayerCache


class Sublayer(nn.Module):
    """The half of a layer that computes x + part(norm(x)); its modules have the names that the layer has."""

    dropout: nn.Module

    def __init__(self, layer: Layer, part: Literal["attention", "mlp"]) -> None:
        super().__init__()
        self.part = part
        for name in (f"{part}_norm", part, "dropout"):
            self.add_module(name, getattr(layer, name))
        self.compute = sublayer_block  # or a compiled one

    def forward(self, x: Tensor, *inputs: Any) -> Tensor:
        """(B, T, D) -> (B, T, D); attention has more inputs: mask, rotation and cache."""
        return self.compute(self, x, *inputs)


class CutLayer(Layer):
    """A layer whose halves are units, with the parameters and names of a whole one.

    The halves are in a tuple, so that each of their modules has one name, the one in the layer.
    """

    def __init__(self, config: ModelConfig, parts: ModelComponents, recompute_scores: bool) -> None:
        super().__init__(config, parts, recompute_scores)
        self.sublayers = Sublayer(self, "attention"), Sublayer(self, "mlp")

    def forward(
        self,
        x: Tensor,
        mask: Mask = CAUSAL,
        rotation: Rotation = UNROTATED,
        cache: "LayerCache | None" = None,
    ) -> Tensor:
        """See Layer."""
        attention, mlp = self.sublayers
        return mlp(attention(x, mask, rotation, cache))

    @property
    def compiled(self) -> bool:
        """See Layer."""
        return self.sublayers[0].compute is not sublayer_block

    def units(self) -> tuple[nn.Module, ...]:
        """See Layer."""
        return self.sublayers


def sublayer_block(
    sublayer: Sublayer, x: Tensor, *inputs: Any, kernels: BlockKernels = PLAIN_BLOCK
) -> Tensor:
    """A half of `transformer_block`, with the same bits: (B, T, D) -> (B, T, D)."""
    norm, part = getattr(sublayer, f"{sublayer.part}_norm"), getattr(sublayer, sublayer.part)
    return x + sublayer.dropout(part(norm(x), *inputs, kernels))
