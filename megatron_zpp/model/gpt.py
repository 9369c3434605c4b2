"""GPT-2 / GPT-3: a pre-LN decoder with learned positions (GPT-2 paper, 2.3; GPT-3 paper, 2.1).

Shapes: B batch, T tokens, D hidden size, N heads, H head width, F inner width of the MLP,
V padded vocabulary.
The model knows nothing of ranks: `GPT(config, vocab_size)` trains on a laptop as it is.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.model.offload import ActivationOffload


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int) -> None:
        super().__init__()
        self.tokens = _embedding(padded_vocab_size, config.hidden_size)
        self.positions = _embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, D)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T)
        return self.dropout(self.tokens(tokens) + self.positions(positions))


def _embedding(entries: int, width: int) -> nn.Embedding:
    """As torch draws it; but its own way, on the meta device, would import the compiler: seconds a start."""
    return nn.Embedding(entries, width, _weight=torch.randn(entries, width))


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig, recompute_scores: bool) -> None:
        super().__init__()
        self.heads, self.head_width = config.num_attention_heads, config.kv_channels
        self.dropout = config.attention_dropout
        self.recompute_scores = recompute_scores
        width = self.heads * self.head_width
        self.qkv = nn.Linear(config.hidden_size, 3 * width)
        self.output = nn.Linear(width, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.head_width))  # (B, T, 3, N, H)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # each (B, N, T, H)
        if self.recompute_scores and self.training:
            mixed = checkpoint(self._mix, q, k, v, use_reentrant=False)
        else:
            mixed = self._mix(q, k, v)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class MLP(nn.Module):
    """Two linear maps with GPT-2's tanh-approximated GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.hidden_size, config.ffn_hidden_size)
        self.output = nn.Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D) through (B, T, F)."""
        return self.output(F.gelu(self.input(x), approximate="tanh"))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, norm: type[nn.Module], recompute_scores: bool) -> None:
        super().__init__()
        self.attention_norm = norm(config.hidden_size, eps=config.norm_epsilon)
        self.attention = Attention(config, recompute_scores)
        self.mlp_norm = norm(config.hidden_size, eps=config.norm_epsilon)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Head(nn.Module):
    """Final norm, and the output weights where they are not the token embedding's."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(config.hidden_size, eps=config.norm_epsilon)
        self.output = (
            nn.Linear(config.hidden_size, padded_vocab_size, bias=False)
            if config.untie_embeddings_and_output_weights
            else None
        )

    def forward(self, x: Tensor, tied: Tensor) -> Tensor:
        """(B, T, D) and the token embedding (V, D) -> logits (B, T, V)."""
        x = self.norm(x)
        return F.linear(x, tied) if self.output is None else self.output(x)


class GPT(nn.Module):
    """The transformer; `vocab_size` is the tokenizer's, the tables are padded as the config says.

    `norm` is nn.LayerNorm or a class with its constructor.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        recompute: RecomputeConfig | None = None,
        norm: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.recompute = recompute or RecomputeConfig()
        padded = config.padded_vocab_size(vocab_size)
        selective = self.recompute.recompute_granularity == "selective"
        self.offload = ActivationOffload() if self.recompute.recompute_offload else None
        self.embedding = Embedding(config, padded)
        self.layers = nn.ModuleList(Layer(config, norm, selective) for _ in range(config.num_layers))
        self.head = Head(config, padded, norm)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, T) ids -> logits (B, T, vocab_size); with targets (B, T) their mean cross-entropy, fp32."""
        x = self.embedding(tokens)  # (B, T, D)
        for first, last, recomputed in self._segments():
            if recomputed and self.training:
                with self.offload.saving() if self.offload else nullcontext():
                    x = checkpoint(self._run_layers, x, first, last, use_reentrant=False)
            else:
                x = self._run_layers(x, first, last)
        logits = self.head(x, self.embedding.tokens.weight)  # (B, T, V)
        # Rows that only pad the vocabulary take no part in the softmax: the loss does not depend on padding.
        logits = logits[..., : self.vocab_size]
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def units(self) -> list[tuple[str, nn.Module]]:
        """The modules whose parameters are gathered together, in the order of the forward pass."""
        layers = [(f"layers.{index}", layer) for index, layer in enumerate(self.layers)]
        return [("embedding", self.embedding), *layers, ("head", self.head)]

    def initialize(self, seed: int) -> "GPT":
        """Fills every parameter with its initial value."""
        for name, parameter in self.named_parameters():
            self.initialize_parameter(name, parameter, seed)
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

    def _segments(self) -> Iterator[tuple[int, int, bool]]:
        """Runs of layers as (first, last + 1, whether they are recomputed in backward)."""
        layers, plan = self.config.num_layers, self.recompute
        if plan.recompute_granularity == "full" and plan.recompute_method == "uniform":
            for first in range(0, layers, plan.recompute_num_layers):
                yield first, min(first + plan.recompute_num_layers, layers), True
            return
        recomputed = plan.recompute_num_layers if plan.recompute_granularity == "full" else 0
        for first in range(recomputed):
            yield first, first + 1, True
        yield recomputed, layers, False

    def _run_layers(self, x: Tensor, first: int, last: int) -> Tensor:
        for layer in self.layers[first:last]:
            x = layer(x)
        return x


def norm_class(backend: str) -> type[nn.Module]:
    """LayerNorm of the fused backend "torch" or "apex"."""
    if backend == "torch":
        return nn.LayerNorm
    from apex.normalization import FusedLayerNorm

    return FusedLayerNorm


def _tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch's seeds are signed
