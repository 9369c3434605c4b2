"""The shape of the transformer, its regularisation, and what is recomputed instead of stored."""

from dataclasses import dataclass
from typing import Any, Literal

from megatron_zpp.config.options import Options, option, option_error

# GPT-2 and GPT-3 shapes (GPT-3 paper, table 2.1; 345m is Megatron-LM's GPT-2; 18b is the ZeRO++ tutorial's).
_SHAPES = {  # layers, hidden size, attention heads, sequence length
    "gpt2-125m": (12, 768, 12, 1024),
    "345m": (24, 1024, 16, 1024),
    "760m": (24, 1536, 16, 1024),
    "1.3b": (24, 2048, 16, 1024),
    "2.7b": (32, 2560, 32, 2048),
    "6.7b": (32, 4096, 32, 2048),
    "13b": (40, 5120, 40, 2048),
    "18b": (40, 6144, 32, 512),
    "175b": (96, 12288, 96, 2048),
}

_WIDEST = 2**20  # beyond any model: a slip of the keyboard is refused before it is built

ModelPreset = Literal["gpt2-125m", "345m", "760m", "1.3b", "2.7b", "6.7b", "13b", "18b", "175b"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """model: the shape of the transformer"""

    model_preset: ModelPreset | None = option(
        None, "A published shape; flags beside it override single values."
    )
    # `int` with None as its default: `check` fills the field or refuses to go without it.
    num_layers: int = option(None, "Transformer layers.", at_least=1, at_most=10_000)
    hidden_size: int = option(None, "Width of the residual stream.", at_least=1, at_most=_WIDEST)
    num_attention_heads: int = option(None, "Attention heads.", at_least=1, at_most=_WIDEST)
    seq_length: int = option(None, "Tokens per sample.", at_least=1, at_most=2**31 - 1)
    max_position_embeddings: int = option(
        None, "Rows of the position table; default --seq-length.", at_least=1, at_most=2**31 - 1
    )
    ffn_hidden_size: int = option(
        None, "Width inside the MLP; default 4 × --hidden-size.", at_least=1, at_most=4 * _WIDEST
    )
    kv_channels: int = option(
        None,
        "Width of one head; default --hidden-size / --num-attention-heads.",
        at_least=1,
        at_most=_WIDEST,
    )
    make_vocab_size_divisible_by: int = option(
        128, "The vocabulary is padded to a multiple of this.", at_least=1, at_most=_WIDEST
    )
    norm_epsilon: float = option(1e-5, "Added to the variance in LayerNorm.", above=0)
    untie_embeddings_and_output_weights: bool = option(
        False, "Give the output layer weights of its own instead of the token embedding's."
    )
    init_method_std: float = option(
        0.02, "Standard deviation of the initial weights; residual outputs get it / √(2 × layers).", above=0
    )
    attention_dropout: float = option(0.1, "Dropout probability of attention weights.", at_least=0, below=1)
    hidden_dropout: float = option(0.1, "Dropout probability of hidden states.", at_least=0, below=1)

    def check(self) -> None:
        """Fills what a preset or another field implies, then refuses shapes that cannot be built."""
        if self.model_preset:
            names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
            for name, value in zip(names, _SHAPES[self.model_preset], strict=True):
                self._fill(name, value)
        for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
            if getattr(self, name) is None:
                flag = "--" + name.replace("_", "-")
                raise option_error(
                    flag, "(not given)", f"give it, or a --model-preset of {', '.join(_SHAPES)}"
                )
        self._fill("max_position_embeddings", self.seq_length)
        self._fill("ffn_hidden_size", 4 * self.hidden_size)
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise option_error(
                "--num-attention-heads",
                self.num_attention_heads,
                f"must divide --hidden-size {self.hidden_size}, or give --kv-channels",
            )
        self._fill("kv_channels", self.hidden_size // self.num_attention_heads)
        if self.seq_length > self.max_position_embeddings:
            raise option_error(
                "--seq-length",
                self.seq_length,
                f"must be at most --max-position-embeddings {self.max_position_embeddings}",
            )

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Rows of the token embedding: `vocab_size` rounded up to --make-vocab-size-divisible-by."""
        multiple = self.make_vocab_size_divisible_by
        return -(-vocab_size // multiple) * multiple

    def _fill(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)  # frozen from here on: __post_init__ is still running


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(Options):
    """recomputation: activations computed again in backward instead of stored"""

    recompute_activations: bool = option(False, "Short for --recompute-granularity selective.")
    recompute_granularity: Literal["full", "selective"] | None = option(
        None, "full: whole layers; selective: attention scores only."
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        None,
        "full only. uniform: every chunk of --recompute-num-layers layers; block: the first so many layers.",
    )
    recompute_num_layers: int | None = option(
        None, "full only. Layers of a chunk (uniform) or layers recomputed (block).", at_least=1
    )
    recompute_offload: bool = option(
        False, "full only. Keep what recomputation starts from in CPU memory; GPUs only."
    )

    def check(self) -> None:
        """--recompute-activations resolves to selective; the others belong to full."""
        if self.recompute_activations:
            if self.recompute_granularity == "full":
                raise option_error(
                    "--recompute-granularity", "full", "contradicts --recompute-activations; give one"
                )
            object.__setattr__(self, "recompute_granularity", "selective")
        if self.recompute_granularity == "full":
            if self.recompute_method is None:
                raise option_error(
                    "--recompute-granularity", "full", "needs --recompute-method uniform or block"
                )
            if self.recompute_num_layers is None:
                object.__setattr__(self, "recompute_num_layers", 1)
            return
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(self, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise option_error(flag, getattr(self, name), "needs --recompute-granularity full")
        if self.recompute_offload:
            raise option_error("--recompute-offload", "(given)", "needs --recompute-granularity full")

    def check_device(self, device: str) -> None:
        """Raises ValueError where there is no memory but the CPU's to keep activations in."""
        if self.recompute_offload and device != "cuda":
            raise option_error("--recompute-offload", "(given)", f"needs GPUs; this run is on the {device}")
