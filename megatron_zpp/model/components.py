"""The components of layers, which decide how they are computed: norms, linear maps, attention's kernel.

A model is built of these; model/parallel/layers.py has others, for layers that ranks share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.attention import AttentionKernel, DotProduct

Norm: TypeAlias = nn.LayerNorm | nn.RMSNorm  # or apex's, with the same parameters and attributes


TORCH_NORMS: Mapping[str, type[Norm]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}


def norm_classes(backend: str) -> Mapping[str, type[Norm]]:
    """Return the norms of the fused backend "torch" or "apex", by --normalization."""
    if backend == "torch":
        return TORCH_NORMS
    from apex.normalization import FusedLayerNorm, FusedRMSNorm

    return {"LayerNorm": FusedLayerNorm, "RMSNorm": FusedRMSNorm}


def embedding(entries: int, width: int) -> nn.Embedding:
    """Return torch's embedding. Initialised by torch on the meta device it would import sympy: seconds."""
    weight = torch.empty(entries, width)
    return nn.Embedding(entries, width, _weight=weight if weight.is_meta else weight.normal_())


@dataclass(frozen=True)
class ModelComponents:
    """The components of layers: constructors with the parameters of torch's, and the attention kernel."""

    norms: Mapping[str, type[Norm]] = field(default_factory=lambda: TORCH_NORMS)  # by --normalization
    linear: Callable[..., nn.Linear] = nn.Linear
    attention: AttentionKernel = field(default_factory=DotProduct)
    output_product: Callable[[], Any] | None = None  # of the loss, see model/fp8/output.py; None: torch's

    @property
    def tensor_ranks(self) -> int:
        """How many ranks share each layer: every one has an equal part of heads, groups and inner width."""
        return 1

    def norm(self, config: ModelConfig, width: int) -> Norm:
        """Return a norm of vectors of `width` elements."""
        return self.norms[config.normalization](width, eps=config.norm_epsilon)

    def column(self, inputs: int, outputs: int, *, bias: bool, runs: tuple[int, ...] = ()) -> nn.Linear:
        """Return a linear map whose outputs can be split; `runs` are those that are split by themselves."""
        return self.linear(inputs, outputs, bias=bias)

    def row(self, inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
        """Return a linear map whose inputs can be split."""
        return self.linear(inputs, outputs, bias=bias)

    @property
    def table_rows(self) -> int | None:
        """Rows of the blocks that the tables of the vocabulary consist of; None: the tables are whole."""
        return None

    def vocabulary(self, entries: int, width: int) -> Any:
        """Return the embedding of tokens."""
        return embedding(entries, width)

    def output(self, width: int, entries: int) -> Any:
        """Return the output weights of a model that does not share those of the embedding."""
        return nn.Linear(width, entries, bias=False)

    def hidden_shape(self, batch: int, tokens: int, width: int) -> tuple[int, ...]:
        """The shape of hidden states between linear maps."""
        return batch, tokens, width

    def own_positions(self, positions: Tensor, tokens: Tensor) -> Tensor:
        """Return those of `positions` (B or 1, T) whose hidden states this rank has between linear maps."""
        return positions

    def tie(self, head: nn.Module, table: nn.Module) -> None:
        """Let `head`, which has no output weights, use `table`; a whole one is an argument of its forward."""

    def units(self, name: str, module: nn.Module, *, tied: bool) -> list[tuple[str, nn.Module]]:
        """Return the names and modules of the units of the embedding or the head, in forward order.

        `tied`: the table in it, if any, is that of the embedding.
        """
        return [(name, module)]

    def head_class(self, plain: type[nn.Module]) -> Any:
        """Return the class of a model's head; `plain` is the one without tensor ranks."""
        return plain
