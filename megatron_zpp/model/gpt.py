"""A pre-norm decoder: GPT-2, GPT-3 (GPT-2 paper, 2.3; GPT-3 paper, 2.1), and Llama-like models by flags.

This file has the model from tokens to loss; model/layer.py has one layer.
Shapes: B batch, T tokens, D hidden size, V padded vocabulary.
The model knows nothing of ranks: `GPT(config, entries)` trains on a laptop as it is. Tensor ranks share it
by its components alone (model/parallel/layers.py); V is then one rank's part.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.model.attention import mask_of
from megatron_zpp.model.components import ModelComponents, embedding
from megatron_zpp.model.layer import Layer
from megatron_zpp.model.loss import PLAIN, LossKernels, linear_cross_entropy, logits_to_gradient
from megatron_zpp.model.masks import Mask
from megatron_zpp.model.recomputation import recomputed_units, segments, units_of_a_layer
from megatron_zpp.model.rotary import UNROTATED, RopeScaling, RotaryEmbedding, Rotation
from megatron_zpp.model.sublayers import CutLayer

if TYPE_CHECKING:
    from megatron_zpp.model.offload import ActivationOffload


class Embedding(nn.Module):
    """Token embedding, with dropout."""

    def __init__(self, config: ModelConfig, parts: ModelComponents, padded_vocab_size: int) -> None:
        super().__init__()
        self.tokens = parts.vocabulary(padded_vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(B, T) ids and their positions (B or 1, T) -> (B, T, D)."""
        return self.dropout(self.tokens(tokens))


class PositionedEmbedding(Embedding):
    """Token plus learned position embedding."""

    def __init__(self, config: ModelConfig, parts: ModelComponents, padded_vocab_size: int) -> None:
        super().__init__(config, parts, padded_vocab_size)
        self.positions = embedding(config.max_position_embeddings, config.hidden_size)
        self.own_positions = parts.own_positions

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """See Embedding."""
        return self.dropout(self.tokens(tokens) + self.positions(self.own_positions(positions, tokens)))


class Head(nn.Module):
    """Final norm, and the output weights where they are not the token embedding's; with targets the loss."""

    def __init__(
        self, config: ModelConfig, parts: ModelComponents, vocab_size: int, padded_vocab_size: int
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.passes = PLAIN  # or compiled ones
        self.norm = parts.norm(config, config.hidden_size)
        self.product = None if parts.output_product is None else parts.output_product()
        untied = config.untie_embeddings_and_output_weights
        self.output = parts.output(config.hidden_size, padded_vocab_size) if untied else None

    def forward(self, x: Tensor, tied: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, T, D) and the token embedding (V, D) -> logits (B, T, V); with targets (B, T) the mean loss.

        Rows that only pad the vocabulary take no part in the loss: it does not depend on padding. Logits are
        16-bit products, also where those of the loss are of 8-bit floats.
        """
        x = self.norm(x)
        weight = tied if self.output is None else self.output.weight
        if targets is None:
            return F.linear(x, weight)
        loss = linear_cross_entropy if self.product is None else self.product.loss
        return loss(x.flatten(0, 1), weight, targets.flatten(), self.vocab_size, passes=self.passes)

    def compile_loss(
        self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]], fused: LossKernels | None
    ) -> None:
        """Let `fused` kernels compute the loss beside its products, or else a graph of `compiler`.

        There will be a graph for whole chunks of tokens, and one where the last chunk is smaller.
        """
        self.passes = fused or LossKernels(compiler(logits_to_gradient))


class GPT(nn.Module):
    """The transformer for a tokenizer of `entries`.

    `vocab_size` tokens take part in the softmax: as many, or --padded-vocab-size. The tables are padded as
    the config says. `parts` are torch's own by default. `cut_layers`: the halves of a layer are units of
    their own.
    """

    def __init__(
        self,
        config: ModelConfig,
        entries: int,
        recompute: RecomputeConfig | None = None,
        parts: ModelComponents | None = None,
        *,
        cut_layers: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.cut_layers = config, cut_layers
        self.entries, self.vocab_size = entries, config.vocabulary(entries)
        self.recompute = recompute or RecomputeConfig()
        padded = config.embedding_rows(entries)
        selective = self.recompute.recompute_granularity == "selective"
        self.offload = _activation_offload() if self.recompute.recompute_offload else None
        learned = config.position_embedding_type == "learned_absolute"
        self.windows = config.layer_windows
        self.parts = parts or ModelComponents()
        self.embedding = (PositionedEmbedding if learned else Embedding)(config, self.parts, padded)
        self.rotary = _rotary(config)
        layer = CutLayer if cut_layers else Layer
        self.layers = nn.ModuleList(layer(config, self.parts, selective) for _ in range(config.num_layers))
        head: type[Head] = self.parts.head_class(Head)
        self.head = head(config, self.parts, self.vocab_size, padded)
        if self._tied:
            self.parts.tie(self.head, self.embedding.tokens)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """(B, T) ids -> logits (B, T, vocab_size); with targets (B, T) their mean cross-entropy, fp32.

        A target of -100 is not counted. `positions` (B, T) are 0 to T - 1 by default. Attention is causal
        over the row, or inside documents that `documents` (E) ends, as in model/attention.py.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]  # (1, T)
        x = self.embedding(tokens, positions)  # (B, T, D)
        rotation = self.rotation(positions)
        shaped = x.new_empty(1).expand(*tokens.shape, 1)  # x itself may be of some of the tokens only
        masks = {
            window: mask_of(self.parts.attention, shaped, window, documents) for window in set(self.windows)
        }
        for first, last, recomputed in segments(self.config.num_layers, self.recompute):
            run = partial(self._run_layers, first=first, last=last, masks=masks, rotation=rotation)
            if recomputed and self.training:
                with self.offload.saving() if self.offload else nullcontext():
                    x = checkpoint(run, x, use_reentrant=False)  # x alone is kept, and may be offloaded
            else:
                x = run(x)
        if targets is not None:
            return self.head(x, self.embedding.tokens.weight, targets)
        return self.head(x, self.embedding.tokens.weight)[..., : self.vocab_size]

    def rotation(self, positions: Tensor) -> Rotation:
        """Return what rotates queries and keys at positions (B or 1, T)."""
        return UNROTATED if self.rotary is None else self.rotary.rotation(positions)

    @property
    def compiled(self) -> bool:
        """Whether the layers are compiled."""
        first = self.layers[0]
        assert isinstance(first, Layer)
        return first.compiled

    @property
    def table_rows(self) -> int | None:
        """Rows of the blocks that the tables of the vocabulary consist of; None: the tables are whole."""
        return self.parts.table_rows

    def units(self) -> list[tuple[str, nn.Module]]:
        """The modules whose parameters are gathered together, in the order of the forward pass.

        Blocks of a tied table are there twice: with the embedding, and as modules of the head with the same
        parameters.
        """
        layers = [
            (f"layers.{index}", unit)
            for index, layer in enumerate(cast(list[Layer], list(self.layers)))
            for unit in layer.units()
        ]
        return [*self._embedding_units(), *layers, *self.parts.units("head", self.head, tied=self._tied)]

    def recomputed_units(self) -> list[range]:
        """Ranges of `units()` that the backward recomputes, each as a whole before its gradients."""
        of_a_layer, first = units_of_a_layer(self.cut_layers), len(self._embedding_units())
        return recomputed_units(self.config.num_layers, self.recompute, of_a_layer, first)

    @torch.no_grad()
    def initialize(self, seed: int) -> "GPT":
        """Fills every parameter with its initial value."""
        for unit, module in self.units():
            for path, parameter in module.named_parameters():
                rows, entries = getattr(module, "block_rows", None), getattr(module, "table_entries", 0)
                whole = parameter if rows is None else parameter.new_empty(entries, *parameter.shape[1:])
                self.initialize_parameter(f"{unit}.{path}", whole, seed)
                if rows is not None:
                    parameter.copy_(whole[rows.start : rows.stop])
        return self

    @torch.no_grad()
    def initialize_parameter(self, name: str, tensor: Tensor, seed: int) -> None:
        """GPT-2's initial weights: N(0, std), residual outputs N(0, std / √(2 × layers)), zero biases.

        Every tensor draws from a generator of its own, keyed by seed and name, so that a part of the model
        gets the same values whether or not the rest is there.
        """
        if name.endswith("bias"):
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)
        else:
            std = self.config.init_method_std
            if name.startswith("layers.") and name.endswith("output.weight"):
                std /= math.sqrt(2 * self.config.num_layers)
            generator = torch.Generator(tensor.device).manual_seed(_tensor_seed(seed, name))
            tensor.normal_(0.0, std, generator=generator)
        if name in ("embedding.tokens.weight", "head.output.weight"):
            tensor[self.vocab_size :] = 0.0

    @property
    def _tied(self) -> bool:
        return not self.config.untie_embeddings_and_output_weights

    def _embedding_units(self) -> list[tuple[str, nn.Module]]:
        return self.parts.units("embedding", self.embedding, tied=False)

    def _run_layers(
        self, x: Tensor, first: int, last: int, masks: Mapping[int | None, Mask], rotation: Rotation
    ) -> Tensor:
        for layer, window in zip(self.layers[first:last], self.windows[first:last], strict=True):
            x = layer(x, masks[window], rotation)
        return x


def _activation_offload() -> "ActivationOffload":
    from megatron_zpp.model.offload import ActivationOffload

    return ActivationOffload()


def _rotary(config: ModelConfig) -> RotaryEmbedding | None:
    if config.position_embedding_type != "rope":
        return None
    assert config.rotary_base is not None, "ModelConfig.check fills it for rope"
    scaling = None
    if config.use_rope_scaling:
        assert config.rope_scaling_factor is not None, "ModelConfig.check fills it with the scaling"
        scaling = RopeScaling(config.rope_scaling_factor)
    return RotaryEmbedding(config.rotated_channels, config.rotary_base, scaling)


def _tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch's seeds are signed
