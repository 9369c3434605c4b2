"""One transformer layer: attention and an MLP, each behind a norm, and the forward pass through them.

Shapes: B batch, T tokens, D hidden size, N query heads, G heads of keys and values (query groups), H head
width, C tokens in a cache, F inner width of the MLP. If tensor ranks share the model, then N, G and F are one
rank's parts, and (B, T, D) is (R, D), the rows of this rank's tokens.

Runs replace modules of a layer, whose names stay: linear maps by those of 8-bit products or of tensor ranks
(model/build.py), norms by apex's, and on GPUs the classes of attention, MLP and halves by those with Triton
kernels (model/fused/blocks.py).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.attention import AttentionKernel
from megatron_zpp.model.masks import CAUSAL, Mask
from megatron_zpp.model.rotary import UNROTATED, Rotation
from megatron_zpp.model.scores import Scores, alibi_slopes
from megatron_zpp.model.shape import LinearShape, layer_shape

Norm: TypeAlias = nn.LayerNorm | nn.RMSNorm  # or apex's, with the same parameters and attributes
# Keeps keys and values of new tokens (B, T, G, H), and returns those of all columns of a cache (B, C, G, H)
KVCache: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
TORCH_NORMS: Mapping[str, type[Norm]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}


def norm_of(config: ModelConfig, width: int, *, of_sums: bool = False) -> Norm:
    """The norm of a model, of vectors of `width` elements; `of_sums`: of the residual stream."""
    centred = config.apply_layernorm_1p
    norms = WIDE_NORMS if centred or (of_sums and config.fp32_residual_connection) else TORCH_NORMS
    norm: Any = norms[config.normalization](width, eps=config.norm_epsilon)
    if centred:
        norm.offset = 1.0
    return norm


class WideLayerNorm(nn.LayerNorm):
    """A LayerNorm in fp32, which returns the format of its weights (--fp32-residual-connection).

    It multiplies by its weights plus an `offset`: 1 with --apply-layernorm-1p.
    """

    offset = 0.0

    def forward(self, input: Tensor) -> Tensor:
        """(…, width) -> (…, width)."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        gain, bias = self.offset + self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(input.to(wide), self.normalized_shape, gain, bias, self.eps).to(self.weight.dtype)


class WideRMSNorm(nn.RMSNorm):
    """The same of an RMSNorm."""

    offset = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) -> (…, width)."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        gain = self.offset + self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.normalized_shape, gain, self.eps).to(self.weight.dtype)


WIDE_NORMS: Mapping[str, type[Norm]] = {"LayerNorm": WideLayerNorm, "RMSNorm": WideRMSNorm}


def linear_of(shape: LinearShape) -> nn.Linear:
    """A linear map of this shape."""
    return nn.Linear(shape.inputs, shape.outputs, bias=shape.biased)


class Attention(nn.Module):
    """Causal self-attention with N query heads in G groups that share keys and values; G = N without groups.

    The rows of `qkv` are those of all queries, then of all keys, then of all values: `runs`. `sinks` (N) are
    the weights of --softmax-type learnable.
    """

    def __init__(self, config: ModelConfig, kernel: AttentionKernel, recompute_scores: bool) -> None:
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_query_groups
        self.head_width, self.dropout = config.kv_channels, config.attention_dropout
        self.recompute_scores, self.kernel = recompute_scores, kernel
        shape = layer_shape(config)
        self.qkv, self.runs = linear_of(shape.qkv), shape.qkv.runs
        self.normalized, self.across_heads = config.qk_layernorm, config.qk_layernorm_across_heads
        widths = [width for _, width in shape.head_norms]
        self.query_norm, self.key_norm = (
            norm_of(config, width) if width else nn.Identity() for width in widths or (0, 0)
        )
        self.output = linear_of(shape.output)
        self.scale, self.softcap = config.softmax_scale, config.attn_logit_softcapping
        self.alibi_heads = config.num_attention_heads if config.position_embedding_type == "alibi" else 0
        self.first_head = 0  # of this rank's, among all
        self.softmax_type = config.softmax_type
        self.sinks = nn.Parameter(torch.zeros(shape.sinks)) if shape.sinks else None

    def forward(self, x: Tensor, mask: Mask, rotation: Rotation, cache: KVCache | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); a `cache` comes with its mask."""
        q, k, v = self.split(x, rotation)  # (B, T, N, H), and twice (B, T, G, H)
        if cache is not None:
            k, v = cache(k, v)  # each (B, C, G, H)
        dropout = self.dropout if self.training else 0.0
        attend = partial(self.kernel, dropout=dropout, mask=mask, scores=self.scores(q.device))
        if self.recompute_scores and self.training:
            mixed = checkpoint(attend, q, k, v, use_reentrant=False)
        else:
            mixed = attend(q, k, v)
        return self.output(mixed.flatten(2))  # of (B, T, N, H)

    def scores(self, device: torch.device) -> Scores:
        """How scores are made."""
        slopes: Tensor | None = None
        sinks: Tensor | None = self.sinks
        if self.alibi_heads:
            slopes = alibi_slopes(self.alibi_heads, self.first_head, self.heads, device)
        if self.softmax_type == "off-by-one":
            sinks = torch.zeros(self.heads, device=device)
        return Scores(self.scale, self.softcap, slopes, sinks)

    def split(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) -> queries (B, T, N, H) and keys (B, T, G, H), normalised and rotated, and values."""
        q, k, v = self.mapped(x)
        if rotation.rotates and not self.normalized and v.requires_grad:
            v = v.clone()  # a view would keep all of qkv for the backward, which needs nothing else of it
        return rotation(self.normalize(q, self.query_norm)), rotation(self.normalize(k, self.key_norm)), v

    def mapped(self, x: Any) -> tuple[Tensor, ...]:
        """(B, T, D) -> queries, keys and values as the map into heads makes them."""
        heads, groups = self.heads, self.groups
        joined = self.qkv(x).unflatten(-1, (heads + 2 * groups, self.head_width))
        return joined.split([heads, groups, groups], 2)

    def normalize(self, x: Tensor, norm: nn.Module) -> Tensor:
        """The norm of heads (B, T, N or G, H): one by one, or all together."""
        return norm(x.flatten(2)).view(x.shape) if self.across_heads else norm(x)


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


def geglu(x: Tensor) -> Tensor:
    """(…, 2F) -> (…, F): GELU, as `gelu`, of the first half times the second (the same paper)."""
    gate, up = x.chunk(2, -1)
    return gelu(gate) * up


_ACTIVATIONS = {each.__name__: each for each in (gelu, geglu, squared_relu, swiglu)}


class MLP(nn.Module):
    """Two linear maps with an activation between them; a gated one's first makes gate and value: `runs`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.activation]
        shape = layer_shape(config)
        self.input, self.runs = linear_of(shape.mlp_input), shape.mlp_input.runs
        self.output = linear_of(shape.mlp_output)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.output(self.activate(x))

    def activate(self, x: Tensor) -> Tensor:
        """(B, T, D) -> the inner values (B, T, F)."""
        return self.activation(self.input(x))


class Half(nn.Module):
    """Half of a layer: x + norm(part(norm(x))), of attention or the MLP, with either of the norms, or both.

    Its modules have the names that the layer has. `multiplier` is --residual-multiplier.
    """

    dropout: nn.Module

    def __init__(self, layer: "Layer", part: Literal["attention", "mlp"], multiplier: float) -> None:
        super().__init__()
        self.part, self.multiplier = part, multiplier
        for name in (f"{part}_norm", part, f"{part}_output_norm", "dropout"):
            self.add_module(name, getattr(layer, name))
        self.compute = Half.run  # or a compiled one; hooks on this module stay outside of the graph

    def forward(self, x: Any, *inputs: Any) -> Any:
        """(B, T, D) -> (B, T, D); attention has more inputs: mask, rotation and cache."""
        return self.compute(self, x, *inputs)

    def run(self, x: Any, *inputs: Any) -> Any:
        """The only forward pass of a half, in training, compiled and with a cache."""
        x, normed = self.enter(x)
        return self.leave(x, getattr(self, self.part)(normed, *inputs))

    def enter(self, x: Any) -> tuple[Any, Any]:
        """What the half adds to, and its norm: tensors, or what other kernels hand on."""
        return x, getattr(self, f"{self.part}_norm")(x)

    def leave(self, x: Any, made: Tensor) -> Any:
        """The sum with what the part has made."""
        return x + self.added(made)

    def added(self, made: Tensor) -> Tensor:
        """What is added, of what the part has made."""
        added = self.dropout(getattr(self, f"{self.part}_output_norm")(made))
        return added if self.multiplier == 1 else self.multiplier * added


class Layer(nn.Module):
    """Two halves, one behind the other, which are units of their own if `cut` (--zero-unit).

    The halves are in a tuple, so that each of their modules has one name, the one in the layer.
    """

    mlp_chunks = 1  # of which a ChunkedHalf computes the second half

    def __init__(
        self,
        config: ModelConfig,
        kernel: AttentionKernel,
        *,
        recompute_scores: bool,
        cut: bool,
    ) -> None:
        super().__init__()
        before, after = (config.norm_placement in (place, "both") for place in ("before", "after"))
        hidden, multiplier = config.hidden_size, config.residual_multiplier
        self.attention_norm = norm_of(config, hidden, of_sums=True) if before else nn.Identity()
        self.attention = Attention(config, kernel, recompute_scores)
        self.attention_output_norm = norm_of(config, hidden) if after else nn.Identity()
        self.mlp_norm = norm_of(config, hidden, of_sums=True) if before else nn.Identity()
        self.mlp = MLP(config)
        self.mlp_output_norm = norm_of(config, hidden) if after else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.halves, self.cut = (Half(self, "attention", multiplier), Half(self, "mlp", multiplier)), cut
        self.compute = Layer.run  # or a compiled one; hooks on this module stay outside of the graph

    def forward(
        self,
        x: Tensor,
        mask: Mask = CAUSAL,
        rotation: Rotation = UNROTATED,
        cache: KVCache | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); generation passes a cache of keys and values, and its mask."""
        return self.compute(self, x, mask, rotation, cache)

    def run(self, x: Tensor, mask: Mask, rotation: Rotation, cache: KVCache | None = None) -> Tensor:
        attention, mlp = self.halves
        return mlp(attention(x, mask, rotation, cache))

    def units(self) -> tuple[nn.Module, ...]:
        """The modules whose parameters are gathered together, in the order of the forward pass."""
        return self.halves if self.cut else (self,)

    @property
    def in_halves(self) -> bool:
        """Whether one graph cannot compute the layer, because something happens between its halves."""
        return self.cut or self.mlp_chunks > 1

    @property
    def compiled(self) -> bool:
        """Whether graphs compute the layer."""
        return self.compute is not Layer.run or self.halves[0].compute is not Half.run
