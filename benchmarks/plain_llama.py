"""A Llama in plain PyTorch, beside plain_training.py's GPT: RoPE, RMSNorm, SwiGLU, grouped queries."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.config.model import ModelConfig


class Block(nn.Module):
    """A pre-norm layer without biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, width = config.hidden_size, config.ffn_hidden_size, config.kv_channels
        self.heads, self.groups = config.num_attention_heads, config.num_query_groups
        self.norm1, self.norm2 = (nn.RMSNorm(hidden, eps=config.norm_epsilon) for _ in range(2))
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.groups) * width, bias=False)
        self.out = nn.Linear(self.heads * width, hidden, bias=False)
        self.gate_up, self.down = (
            nn.Linear(hidden, 2 * inner, bias=False),
            nn.Linear(inner, hidden, bias=False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, self.heads + 2 * self.groups, -1).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.groups, self.groups], 1)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.heads != self.groups
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's rotation of (B, N, T, H) by (T, H)."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class PlainLlama(nn.Module):
    """A Llama; rope without scaling, which changes no operation of a step."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        width, hidden = config.kv_channels, config.hidden_size
        self.tokens = nn.Embedding(vocabulary, hidden, _weight=0.02 * torch.randn(vocabulary, hidden))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=config.norm_epsilon)
        self.output = nn.Linear(hidden, vocabulary, bias=False)
        if not config.untie_embeddings_and_output_weights:
            self.output.weight = self.tokens.weight
        base = config.rotary_base or 1e4
        angles = torch.outer(torch.arange(config.seq_length), base ** -(torch.arange(0, width, 2) / width))
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.loss = cross_entropy  # or a compiled one

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss(self.output(self.norm(x)), targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, T, V) and (B, T) -> their mean cross-entropy in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
