"""A GPT in plain PyTorch, and a Llama with what Gemma 3 and OLMo 2 have beside it."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron_zpp.config.model import ModelConfig


class Block(nn.Module):
    """A pre-LN layer without dropout."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 with tied embeddings."""

    block: type[nn.Module] = Block  # (width, heads, inner) makes a layer

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.tokens, self.positions = (
            nn.Embedding(rows, width, _weight=0.02 * torch.randn(rows, width))
            for rows in (vocabulary, config.seq_length)
        )
        self.blocks = nn.ModuleList(
            self.block(width, config.num_attention_heads, config.ffn_hidden_size)
            for _ in range(config.num_layers)
        )
        self.places: Tensor | None = None  # of a rank's tokens, where ranks share a sample
        self.residual: torch.dtype | None = None  # of the sum that layers add to; None: the tables'
        self.norm = nn.LayerNorm(width)
        self.loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy  # or a compiled one

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.places is None:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        else:
            x = self.tokens(tokens) + self.positions(self.places)
        x = x if self.residual is None else x.to(self.residual)
        for block in self.blocks:
            x = block(x)
        return self.loss(F.linear(self.norm(x), self.tokens.weight), targets)


class Gain(nn.RMSNorm):
    """A norm that multiplies by 1 + its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class LlamaBlock(nn.Module):
    """A layer without biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, width = config.hidden_size, config.ffn_hidden_size, config.kv_channels
        self.heads, self.groups = config.num_attention_heads, config.num_query_groups
        self.scale, self.geglu = config.softmax_scale, config.geglu
        kind = Gain if config.apply_layernorm_1p else nn.RMSNorm
        before, after = config.norm_placement != "after", config.norm_placement != "before"
        self.norm1, self.norm2, self.norm3, self.norm4 = (
            kind(hidden, eps=config.norm_epsilon) if there else nn.Identity()
            for there in (before, before, after, after)
        )
        self.across = config.qk_layernorm_across_heads
        widths = [each * width if self.across else width for each in (self.heads, self.groups)]
        self.q_norm, self.k_norm = (
            kind(each, eps=config.norm_epsilon) if config.qk_layernorm else nn.Identity() for each in widths
        )
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.groups) * width, bias=False)
        self.out = nn.Linear(self.heads * width, hidden, bias=False)
        self.gate_up, self.down = (
            nn.Linear(hidden, 2 * inner, bias=False),
            nn.Linear(inner, hidden, bias=False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None) -> Tensor:
        x = x + self.norm3(self.attend(self.norm1(x), cos, sin, mask))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        gate = F.gelu(gate, approximate="tanh") if self.geglu else F.silu(gate)
        return x + self.norm4(self.down(gate * up))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None) -> Tensor:
        batch, length, _ = x.shape
        heads, grouped = (self.heads, self.groups, self.groups), self.heads != self.groups
        width = self.out.in_features // self.heads
        q, k, v = self.qkv(x).split([each * width for each in heads], -1)
        if self.across:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.view(batch, length, -1, width).transpose(1, 2) for part in (q, k, v))
        if not self.across:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if mask is None:
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped
            )
        else:
            mixed = flex_attention(q, k, v, block_mask=mask, scale=self.scale, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's rotation of (B, N, T, H) by (T, H)."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class PlainLlama(nn.Module):
    """A Llama, Gemma 3 or OLMo 2; rope without scaling, which changes no operation of a step."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        hidden, self.length = config.hidden_size, config.seq_length
        self.tokens = nn.Embedding(vocabulary, hidden, _weight=0.02 * torch.randn(vocabulary, hidden))
        self.windows = [
            each if (each or self.length) < self.length else None for each in config.layer_windows
        ]
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in self.windows)
        kind = Gain if config.apply_layernorm_1p else nn.RMSNorm
        self.norm, self.multiplier = kind(hidden, eps=config.norm_epsilon), config.embedding_multiplier
        self.output = nn.Linear(hidden, vocabulary, bias=False)
        if not config.untie_embeddings_and_output_weights:
            self.output.weight = self.tokens.weight
        for name, base in (("", config.rotary_base or 1e4), ("_local", config.rotary_base_local or 0)):
            base = base or config.rotary_base or 1e4
            inverse = base ** -(torch.arange(0, config.kv_channels, 2) / config.kv_channels)
            angles = torch.outer(torch.arange(self.length), inverse).repeat(1, 2)
            self.register_buffer(f"cos{name}", angles.cos())
            self.register_buffer(f"sin{name}", angles.sin())
        self.masks: dict[int, BlockMask] = {}
        self.loss = cross_entropy  # or a compiled one

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.multiplier
        for block, window in zip(self.blocks, self.windows, strict=True):
            if window is None:
                x = block(x, self.cos, self.sin, None)
            else:
                x = block(x, self.cos_local, self.sin_local, self.mask(window, x.device))
        return self.loss(self.output(self.norm(x)), targets)

    def mask(self, window: int, device: torch.device) -> BlockMask:
        """That of a window, made once."""
        if window not in self.masks:

            def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return (query >= key) & (query - key < window)

            self.masks[window] = create_block_mask(seen, None, None, self.length, self.length, device)
        return self.masks[window]


def tables_apart(model: nn.Module) -> list[list[nn.Module]]:
    """Modules that FSDP2 gathers beside the layers: both ends of a Llama whose tables are not one."""
    if not isinstance(model, PlainLlama) or model.output.weight is model.tokens.weight:
        return []
    return [[model.tokens], [model.norm, model.output]]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, T, V) and (B, T) -> their mean cross-entropy in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a model and its batches."""
    parser.add_argument("--preset", help="a model preset, or give the three sizes")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--num-attention-heads", type=int)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1, help="in each optimizer step")


def model_of(options: argparse.Namespace, **more: Any) -> ModelConfig:
    """The model that these flags name."""
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    given = {name: getattr(options, name) for name in sizes}
    return ModelConfig(model_preset=options.preset, **given, **more)
