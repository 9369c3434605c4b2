"""A pre-norm decoder: GPT-2, GPT-3 (GPT-2 paper, 2.3; GPT-3 paper, 2.1), and Llama-like models by flags.

This file has the model from tokens to loss; model/layer.py has one layer.
Shapes: B batch, T tokens, D hidden size, V padded vocabulary.
The model knows nothing of ranks: `GPT(config, entries)` trains on a laptop as it is. model/build.py replaces
its modules by those of a run; where tensor ranks share it, V is one rank's part. Where context ranks share
samples, T are all tokens of a sample outside of the model, and this rank's inside.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.model.attention import AttentionKernel, DotProduct
from megatron_zpp.model.layer import Layer, Norm, norm_of
from megatron_zpp.model.loss import (
    PLAIN,
    LossKernels,
    Objective,
    linear_cross_entropy,
    logits_to_gradient,
    soft_capped,
)
from megatron_zpp.model.recomputation import recomputed_units, segments
from megatron_zpp.model.rotary import UNROTATED, Part, Rotation, rotary_embeddings, whole


def embedding(entries: int, width: int) -> nn.Embedding:
    """Return torch's embedding. Initialised by torch on the meta device it would import sympy: seconds."""
    weight = torch.empty(entries, width)
    return nn.Embedding(entries, width, _weight=weight if weight.is_meta else weight.normal_())


class Embedding(nn.Module):
    """Token embedding, plus that of positions if they are learned, with dropout."""

    tokens: Any  # an embedding, or what shares the table

    def __init__(self, config: ModelConfig, padded_vocab_size: int) -> None:
        super().__init__()
        self.tokens = embedding(padded_vocab_size, config.hidden_size)
        self.multiplier = config.embedding_multiplier
        self.norm = norm_of(config, config.hidden_size) if config.embed_layernorm else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.wide = config.fp32_residual_connection
        learned = config.position_embedding_type == "learned_absolute"
        self.positions = embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.own: Callable[[Tensor, Tensor], Tensor] | None = None  # positions of this rank's tokens

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(B, T) ids and their positions (B or 1, T) -> (B, T, D).

        Vectors of tokens are multiplied by --embedding-multiplier in their format, and then normalised if at
        all. With --fp32-residual-connection they are in fp32 from there on.
        """
        found = self.tokens(tokens)
        if self.multiplier != 1:
            found = found * torch.full((), self.multiplier, dtype=found.dtype, device=found.device)
        found = self.norm(found)
        if self.wide:
            found = found.float()
        if self.positions is not None:
            found = found + self.positions(positions if self.own is None else self.own(positions, tokens))
        return self.dropout(found)


class Head(nn.Module):
    """Final norm, and the output weights where they are not the token embedding's; with targets the loss."""

    def __init__(self, norm: Norm, output: Any, objective: Objective, multiplier: float) -> None:
        super().__init__()
        self.norm, self.output, self.objective, self.multiplier = norm, output, objective, multiplier
        self.passes = PLAIN  # or compiled ones
        self.product: Any = None  # of the loss, see model/fp8/output.py; None: torch's
        self.z_loss: Tensor | None = None  # () of the newest micro-batch; None without --z-loss-coeff

    def forward(self, x: Tensor, tied: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, T, D) and the token embedding (V, D) -> logits (B, T, V); with targets (B, T) the mean loss.

        Rows that only pad the vocabulary take no part in the loss: it does not depend on padding. Logits are
        16-bit products, also where those of the loss are of 8-bit floats. The gradient of the loss is also
        that of a z-loss, if the objective has one.
        """
        x = self.normalize(x)
        weight = tied if self.output is None else self.output.weight
        if targets is None:
            return soft_capped(self.logits(x, weight), self.objective.cap)
        loss = linear_cross_entropy if self.product is None else self.product.loss
        # The mean cross-entropy (), or with a z-loss both losses (2,)
        losses = loss(x.flatten(0, -2), weight, targets.flatten(), self.objective, passes=self.passes)
        if losses.dim() == 0:
            return losses
        self.z_loss = losses[1].detach()
        return losses[0]

    def normalize(self, x: Tensor) -> Tensor:
        """The norm, times --logits-multiplier."""
        return self.norm(x) if self.multiplier == 1 else self.norm(x) * self.multiplier

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """What the output weights make of a norm, before the soft cap."""
        return F.linear(x, weight)

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
    the config says. `cut_layers`: the halves of a layer are units of their own.
    """

    layers: Sequence[Layer]  # in a ModuleList
    tensor_ranks = 1  # that share each layer
    part: Part = staticmethod(whole)  # what this rank has of samples (B, T, …)
    joined: Part = staticmethod(whole)  # the inverse of `part`, which all ranks must call

    def __init__(
        self,
        config: ModelConfig,
        entries: int,
        recompute: RecomputeConfig | None = None,
        attention: AttentionKernel | None = None,
        *,
        cut_layers: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.cut_layers = config, cut_layers
        self.entries, self.vocab_size = entries, config.vocabulary(entries)
        self.recompute = recompute or RecomputeConfig()
        padded = config.embedding_rows(entries)
        selective = self.recompute.recompute_granularity == "selective"
        self.offload: Any = None  # of activations
        if self.recompute.recompute_offload:
            from megatron_zpp.model.offload import ActivationOffload

            self.offload = ActivationOffload()
        self.windows = config.layer_windows
        self.attention = attention or DotProduct()
        self.embedding = Embedding(config, padded)
        self.rotary, self.rotary_local = rotary_embeddings(config)
        layers = nn.ModuleList(
            Layer(config, self.attention, recompute_scores=selective, cut=cut_layers)
            for _ in range(config.num_layers)
        )
        self.layers = cast(Sequence[Layer], layers)
        if (chunks := self.recompute.mlp_chunks_for_training) > 1:
            from megatron_zpp.model.chunks import ChunkedHalf

            for layer in self.layers:
                layer.mlp_chunks, layer.halves = chunks, (layer.halves[0], ChunkedHalf(layer, chunks))
        output = None if self.tied else nn.Linear(config.hidden_size, padded, bias=False)
        norm = norm_of(config, config.hidden_size, of_sums=True)
        objective = Objective(self.vocab_size, config.final_logit_softcapping)
        self.head = Head(norm, output, objective, config.logits_multiplier)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """(B, T) ids -> logits (B, T, vocab_size); with targets (B, T) their mean cross-entropy, fp32.

        A target of -100 is not counted, nor one of another context rank. `positions` (B, T) are 0 to T - 1 by
        default. Attention is causal over the row, or inside documents that `documents` (E) ends, as in
        model/attention.py.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]  # (1, T)
        tokens, rotations = self.part(tokens), self.rotations(positions)
        x = self.embedding(tokens, self.part(positions))  # (B, T, D)
        # In the format of queries. x itself may be of some of the tokens only.
        shaped = x.new_empty(1, dtype=self.head.norm.weight.dtype).expand(*tokens.shape, 1)
        masks = {window: self.attention.mask(shaped, window, documents) for window in set(self.windows)}

        def run(x: Tensor, first: int, last: int) -> Tensor:
            for at in range(first, last):
                x = self.layers[at](x, masks[self.windows[at]], rotations[at])
            return x

        for first, last, recomputed in segments(self.config.num_layers, self.recompute):
            if recomputed and self.training:
                with self.offload.saving() if self.offload else nullcontext():
                    # x alone is kept, and may be offloaded.
                    x = checkpoint(run, x, first, last, use_reentrant=False)
            else:
                x = run(x, first, last)
        if targets is not None:
            return self.head(x, self.embedding.tokens.weight, self.part(targets))
        return self.joined(self.head(x, self.embedding.tokens.weight)[..., : self.vocab_size])

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """Return what rotates this rank's queries and keys of each layer; positions (B or 1, T) are whole."""
        if self.rotary is None:
            return [UNROTATED] * len(self.layers)
        usual = local = self.rotary.rotation(positions, self.part)
        if self.rotary_local is not None:
            local = self.rotary_local.rotation(positions, self.part)
        return [
            (usual if window is None else local) if rotated else UNROTATED
            for window, rotated in zip(self.windows, self.config.layers_with_rope, strict=True)
        ]

    @property
    def compiled(self) -> bool:
        """Whether the layers are compiled."""
        return self.layers[0].compiled

    def hidden_shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        """The shape of hidden states between linear maps."""
        width, tokens = self.config.hidden_size, tokens // self.attention.context_ranks
        if self.tensor_ranks == 1:
            return batch, tokens, width
        return batch * tokens // self.tensor_ranks, width

    @property
    def tied(self) -> bool:
        """Whether the output weights are the table of tokens."""
        return not self.config.untie_embeddings_and_output_weights

    def units(self) -> list[tuple[str, nn.Module]]:
        """The modules whose parameters are gathered together, in the order of the forward pass."""
        layers = [
            (f"layers.{index}", unit) for index, layer in enumerate(self.layers) for unit in layer.units()
        ]
        return [("embedding", self.embedding), *layers, ("head", self.head)]

    def recomputed_units(self) -> list[range]:
        """Ranges of `units()` that the backward recomputes, each as a whole before its gradients."""
        return recomputed_units(self.config.num_layers, self.recompute, cut_layers=self.cut_layers)

    def rate_factors(self) -> dict[str, float]:
        """Factors of the learning rate and Adam's epsilon by parameter, where they are not 1: muP's."""
        if self.config.width_ratio == 1:
            return {}
        return {
            f"{unit}.{path}": 1 / self.config.width_ratio
            for unit, module in self.units()
            for path, parameter in module.named_parameters()
            if unit.startswith("layers.") and parameter.dim() > 1
        }

    @torch.no_grad()
    def initialize(self, seed: int) -> "GPT":
        """Fills every parameter with its initial value."""
        for unit, module in self.units():
            for path, parameter in module.named_parameters():
                self.initialize_parameter(f"{unit}.{path}", parameter, seed)
        return self

    @torch.no_grad()
    def initialize_parameter(self, name: str, tensor: Tensor, seed: int) -> None:
        """GPT-2's initial weights: N(0, std), residual outputs N(0, std / √(2 × layers)), zero biases.

        muP divides those of layers by the root of its width ratio.
        Every tensor draws from a generator of its own, keyed by seed and name, so that a part of the model
        gets the same values whether or not the rest is there.
        """
        if name.endswith("bias"):
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(0.0 if self.config.apply_layernorm_1p else 1.0)
        else:
            std = self.config.init_method_std
            if name.startswith("layers."):
                std /= math.sqrt(self.config.width_ratio)
                if name.endswith("output.weight"):
                    std /= math.sqrt(2 * self.config.num_layers)
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            own_seed = int.from_bytes(digest, "little") >> 1  # torch's seeds are signed
            tensor.normal_(0.0, std, generator=torch.Generator(tensor.device).manual_seed(own_seed))
        if name in ("embedding.tokens.weight", "head.output.weight"):
            tensor[self.vocab_size :] = 0.0
