"""A pre-norm decoder: GPT-2, GPT-3 (GPT-2 paper, 2.3; GPT-3 paper, 2.1), and Llama-like models by flags.

Shapes: B batch, T tokens, D hidden size, N query heads, G heads of keys and values (query groups), H head
width, F inner width of the MLP, V padded vocabulary.
The model knows nothing of ranks: `GPT(config, vocab_size)` trains on a laptop as it is. Tensor ranks share it
by its components alone (model/tensor_parallel.py); N, G, F and V are then one rank's parts of each.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.distributed.split import RowBlock
from megatron_zpp.model.attention import mask_of
from megatron_zpp.model.components import ModelComponents, embedding
from megatron_zpp.model.kv_cache import LayerCache
from megatron_zpp.model.loss import PLAIN, LossKernels, linear_cross_entropy, logits_to_gradient
from megatron_zpp.model.masks import CAUSAL, Mask
from megatron_zpp.model.offload import ActivationOffload
from megatron_zpp.model.rotary import UNROTATED, RopeScaling, RotaryEmbedding, Rotation


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


class Attention(nn.Module):
    """Causal self-attention with N query heads in G groups that share keys and values; G = N without groups.

    The rows of `qkv` are those of all queries, then of all keys, then of all values.
    """

    def __init__(self, config: ModelConfig, parts: ModelComponents, recompute_scores: bool) -> None:
        super().__init__()
        self.heads = config.num_attention_heads // parts.tensor_ranks
        self.groups = config.num_query_groups // parts.tensor_ranks
        self.head_width, self.dropout = config.kv_channels, config.attention_dropout
        self.recompute_scores, self.kernel = recompute_scores, parts.attention
        biased = not config.disable_bias_linear
        queries = config.num_attention_heads * config.kv_channels
        keys = config.num_query_groups * config.kv_channels
        self.qkv = parts.column(
            config.hidden_size,
            queries + 2 * keys,
            bias=biased or config.add_qkv_bias,
            runs=(queries, keys, keys),
        )
        self.normalized = config.qk_layernorm
        self.query_norm = parts.norm(config, self.head_width) if self.normalized else nn.Identity()
        self.key_norm = parts.norm(config, self.head_width) if self.normalized else nn.Identity()
        self.output = parts.row(queries, config.hidden_size, bias=biased)

    def forward(
        self, x: Tensor, mask: Mask, rotation: Rotation, cache: LayerCache | None, kernels: "BlockKernels"
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); a `cache` comes with the mask CachedPrefix."""
        q, k, v = kernels.heads(self, x, rotation)  # (B, T, N, H), and twice (B, T, G, H)
        if cache is not None:
            k, v = cache.extend(k, v)  # each (B, C, G, H)
        dropout = self.dropout if self.training else 0.0
        attend = partial(self.kernel, dropout=dropout, mask=mask)
        if self.recompute_scores and self.training:
            mixed = checkpoint(attend, q, k, v, use_reentrant=False)
        else:
            mixed = attend(q, k, v)
        return kernels.project(self.output, mixed.flatten(2))  # of (B, T, N, H)


def gelu(x: Tensor) -> Tensor:
    """GPT-2's tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)² (Primer paper, 2109.08668)."""
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """(…, 2F) -> (…, F): SiLU of the first half times the second (GLU Variants paper, 2002.05202)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and the inputs of each of its outputs
    "gelu": (gelu, 1),
    "squared_relu": (squared_relu, 1),
    "swiglu": (swiglu, 2),
}


class MLP(nn.Module):
    """Two linear maps with an activation between them; with SwiGLU the first makes gate and value."""

    def __init__(self, config: ModelConfig, parts: ModelComponents) -> None:
        super().__init__()
        self.activation, inputs = _ACTIVATIONS[config.activation]
        biased = not config.disable_bias_linear
        inner = config.ffn_hidden_size
        self.input = parts.column(config.hidden_size, inputs * inner, bias=biased, runs=(inner,) * inputs)
        self.output = parts.row(inner, config.hidden_size, bias=biased)

    def forward(self, x: Tensor, kernels: "BlockKernels") -> Tensor:
        """(B, T, D) -> (B, T, D) through (B, T, F)."""
        return kernels.mlp(self, x)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, parts: ModelComponents, recompute_scores: bool) -> None:
        super().__init__()
        self.attention_norm = parts.norm(config, config.hidden_size)
        self.attention = Attention(config, parts, recompute_scores)
        self.mlp_norm = parts.norm(config, config.hidden_size)
        self.mlp = MLP(config, parts)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.compute = transformer_block  # or a compiled one; hooks on this module stay outside of the graph

    def forward(
        self,
        x: Tensor,
        mask: Mask = CAUSAL,
        rotation: Rotation = UNROTATED,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); generation passes a cache of keys and values, and its mask."""
        return self.compute(self, x, mask, rotation, cache)

    @property
    def compiled(self) -> bool:
        """Whether a graph computes the layer."""
        return self.compute is not transformer_block

    def units(self) -> tuple[nn.Module, ...]:
        """The modules whose parameters are gathered together, in the order of the forward pass."""
        return (self,)


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


class BlockKernels:
    """The operations of a block, in plain torch; model/fused/blocks.py replaces some by Triton kernels."""

    def norm(self, layer: Layer, x: Tensor) -> tuple[Any, Tensor]:
        """(B, T, D) -> the norm of x before attention, and what `add_norm` takes as `residual`.

        Norms are what `heads`, `activation` and `mlp` take: tensors, or codes of 8-bit products.
        """
        return layer.attention_norm(x), x

    def add_norm(self, layer: Layer, x: Tensor, added: Tensor, residual: Tensor) -> tuple[Tensor, Any]:
        """x + added and the norm before the MLP of this sum, each (B, T, D)."""
        x = x + added
        return x, layer.mlp_norm(x)

    def heads(self, attention: Attention, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) -> queries (B, T, N, H) and keys (B, T, G, H), normalised and rotated, and values."""
        heads, groups = attention.heads, attention.groups
        qkv = attention.qkv(x).unflatten(-1, (heads + 2 * groups, attention.head_width))
        q, k, v = qkv.split([heads, groups, groups], 2)
        if rotation.rotates and not attention.normalized and v.requires_grad:
            v = v.clone()  # a view would keep all of qkv for the backward, which needs nothing else of it
        return rotation(attention.query_norm(q)), rotation(attention.key_norm(k)), v

    def activation(self, mlp: MLP, x: Tensor) -> Tensor:
        """(B, T, D) -> the inner values of the MLP (B, T, F)."""
        return mlp.activation(mlp.input(x))

    def mlp(self, mlp: MLP, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.project(mlp.output, self.activation(mlp, x))

    def project(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """The linear map that ends attention or the MLP: (B, T, …) -> (B, T, D)."""
        return linear(x)


PLAIN_BLOCK = BlockKernels()


def transformer_block(
    layer: Layer,
    x: Tensor,
    mask: Mask = CAUSAL,
    rotation: Rotation = UNROTATED,
    cache: LayerCache | None = None,
    kernels: BlockKernels = PLAIN_BLOCK,
) -> Tensor:
    """The only forward pass of a whole layer, in training, compiled and with a cache.

    (B, T, D) -> (B, T, D).
    """
    normed, residual = kernels.norm(layer, x)
    mixed = layer.dropout(layer.attention(normed, mask, rotation, cache, kernels))
    x, normed = kernels.add_norm(layer, x, mixed, residual)
    return x + layer.dropout(layer.mlp(normed, kernels))


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


class Head(nn.Module):
    """Final norm, and the output weights where they are not the token embedding's; with targets the loss."""

    def __init__(
        self, config: ModelConfig, parts: ModelComponents, vocab_size: int, padded_vocab_size: int
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.passes = PLAIN  # or compiled ones
        self.norm = parts.norm(config, config.hidden_size)
        untied = config.untie_embeddings_and_output_weights
        self.output = parts.output(config.hidden_size, padded_vocab_size) if untied else None

    def forward(self, x: Tensor, tied: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, T, D) and the token embedding (V, D) -> logits (B, T, V); with targets (B, T) the mean loss.

        Rows that only pad the vocabulary take no part in the loss: it does not depend on padding.
        """
        x = self.norm(x)
        weight = tied if self.output is None else self.output.weight
        if targets is None:
            return F.linear(x, weight)
        return linear_cross_entropy(
            x.flatten(0, 1), weight, targets.flatten(), self.vocab_size, passes=self.passes
        )

    def compile_loss(
        self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]], fused: LossKernels | None
    ) -> None:
        """Let `fused` kernels compute the loss beside its products, or else a graph of `compiler`.

        There will be a graph for whole chunks of tokens, and one where the last chunk is smaller.
        """
        self.passes = fused or LossKernels(compiler(logits_to_gradient))


class GPT(nn.Module):
    """The transformer; `vocab_size` is the tokenizer's, the tables are padded as the config says.

    `parts` are torch's own by default. `cut_layers`: the halves of a layer are units of their own.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        recompute: RecomputeConfig | None = None,
        parts: ModelComponents | None = None,
        *,
        cut_layers: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size, self.cut_layers = config, vocab_size, cut_layers
        self.recompute = recompute or RecomputeConfig()
        padded = config.padded_vocab_size(vocab_size)
        selective = self.recompute.recompute_granularity == "selective"
        self.offload = ActivationOffload() if self.recompute.recompute_offload else None
        learned = config.position_embedding_type == "learned_absolute"
        self.windows = config.layer_windows
        self.parts = parts or ModelComponents()
        self.embedding = (PositionedEmbedding if learned else Embedding)(config, self.parts, padded)
        self.rotary = _rotary(config)
        layer = CutLayer if cut_layers else Layer
        self.layers = nn.ModuleList(layer(config, self.parts, selective) for _ in range(config.num_layers))
        head: type[Head] = self.parts.head_class(Head)
        self.head = head(config, self.parts, vocab_size, padded)
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

    def initialize(self, seed: int) -> "GPT":
        """Fills every parameter with its initial value."""
        for unit, module in self.units():
            for path, parameter in module.named_parameters():
                self._initialize(f"{unit}.{path}", parameter, getattr(module, "row_block", None), seed)
        return self

    @torch.no_grad()
    def _initialize(self, name: str, parameter: Tensor, block: RowBlock | None, seed: int) -> None:
        """Fill a parameter, or the rows of it that are a `block`."""
        if block is None:
            return self.initialize_parameter(name, parameter, seed)
        whole = parameter.new_empty(block.whole_shape(parameter.shape))
        self.initialize_parameter(name, whole, seed)
        parameter.copy_(whole[block.first : block.first + len(parameter)])

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


def segments(layers: int, plan: RecomputeConfig) -> Iterator[tuple[int, int, bool]]:
    """Runs of layers as (first, last + 1, whether they are recomputed in backward)."""
    recomputed = plan.recompute_num_layers or 0  # None unless the granularity is full
    if plan.recompute_method == "uniform":
        for first in range(0, layers, recomputed):
            yield first, min(first + recomputed, layers), True
        return
    for first in range(recomputed):
        yield first, first + 1, True
    yield recomputed, layers, False


def units_of_a_layer(cut_layers: bool) -> int:
    """How many units a layer consists of."""
    return 2 if cut_layers else 1


def recomputed_units(
    layers: int, plan: RecomputeConfig, of_a_layer: int = 1, before: int = 1
) -> list[range]:
    """See GPT.recomputed_units; each layer has as many units, and `before` it are those of the embedding."""
    return [
        range(before + first * of_a_layer, before + stop * of_a_layer)
        for first, stop, again in segments(layers, plan)
        if again
    ]


def _rotary(config: ModelConfig) -> RotaryEmbedding | None:
    if config.position_embedding_type != "rope":
        return None
    assert config.rotary_base is not None, "ModelConfig.check fills it for rope"
    scaling = None
    if config.use_rope_scaling:
        assert config.rope_scaling_factor is not None, "ModelConfig.check fills all four with the scaling"
        assert config.rope_low_freq_factor is not None
        assert config.rope_high_freq_factor is not None
        assert config.rope_original_max_position_embeddings is not None
        scaling = RopeScaling(
            factor=config.rope_scaling_factor,
            low_freq_factor=config.rope_low_freq_factor,
            high_freq_factor=config.rope_high_freq_factor,
            original_positions=config.rope_original_max_position_embeddings,
        )
    return RotaryEmbedding(config.rotated_channels, config.rotary_base, scaling)


def _tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch's seeds are signed
