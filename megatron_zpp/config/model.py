"""The transformer: shape, regularisation, attention kernel, and activation recomputation."""

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

_WIDEST = 2**20  # more than any model has, so that a typing error is refused before memory is allocated

ModelPreset = Literal["gpt2-125m", "345m", "760m", "1.3b", "2.7b", "6.7b", "13b", "18b", "175b"]
AttentionBackend = Literal[
    "auto", "math", "efficient", "flash", "cudnn", "flash3", "fused", "unfused", "local"
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """model: the shape of the transformer"""

    model_preset: ModelPreset | None = option(
        None, "A published model shape; other flags override its values."
    )
    # An `int` whose default is None is either filled by `check` or required.
    num_layers: int = option(None, "Transformer layers.", at_least=1, at_most=10_000)
    hidden_size: int = option(None, "Width of the residual stream.", at_least=1, at_most=_WIDEST)
    num_attention_heads: int = option(None, "Attention heads.", at_least=1, at_most=_WIDEST)
    seq_length: int = option(None, "Tokens per sample.", at_least=1, at_most=2**31 - 1)
    max_position_embeddings: int = option(
        None, "Rows of the position embedding; default --seq-length.", at_least=1, at_most=2**31 - 1
    )
    ffn_hidden_size: int = option(
        None, "Inner width of the MLP; default 4 × --hidden-size.", at_least=1, at_most=4 * _WIDEST
    )
    kv_channels: int = option(
        None,
        "Width of an attention head; default --hidden-size / --num-attention-heads.",
        at_least=1,
        at_most=_WIDEST,
    )
    make_vocab_size_divisible_by: int = option(
        128, "Pad the vocabulary to a multiple of this.", at_least=1, at_most=_WIDEST
    )
    norm_epsilon: float = option(1e-5, "Added to the variance in LayerNorm.", above=0)
    untie_embeddings_and_output_weights: bool = option(
        False, "Give the output layer separate weights instead of sharing the token embedding's."
    )
    init_method_std: float = option(
        0.02,
        "Standard deviation of initial weights; divided by √(2 × layers) where a matrix writes to the "
        "residual stream.",
        above=0,
    )
    attention_dropout: float = option(0.1, "Dropout probability of attention weights.", at_least=0, below=1)
    hidden_dropout: float = option(0.1, "Dropout probability of hidden states.", at_least=0, below=1)

    def check(self) -> None:
        """Fill fields that a preset or another field implies, then refuse shapes that cannot be built."""
        if self.model_preset:
            names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
            for name, value in zip(names, _SHAPES[self.model_preset], strict=True):
                self._fill(name, value)
        for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
            if getattr(self, name) is None:
                flag = "--" + name.replace("_", "-")
                raise option_error(
                    flag, "(not given)", f"give it, or --model-preset with one of {', '.join(_SHAPES)}"
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
        """Return `vocab_size` rounded up to --make-vocab-size-divisible-by: rows of the token embedding."""
        multiple = self.make_vocab_size_divisible_by
        return -(-vocab_size // multiple) * multiple

    def _fill(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)  # __post_init__ is running: nobody has seen the old value


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Options):
    """attention: which kernel computes it"""

    attention_backend: AttentionBackend = option(
        "auto",
        "Attention kernel. auto: the fastest for device, number format and masks. math, efficient, flash and "
        "cudnn: torch's. flash3: FlashAttention-3's package flash_attn_interface. fused: Megatron-LM's name "
        "for cudnn; unfused, local: its names for math. A named kernel that cannot be used is an error.",
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(Options):
    """recomputation: compute activations again in backward instead of storing them"""

    recompute_activations: bool = option(False, "Short for --recompute-granularity selective.")
    recompute_granularity: Literal["full", "selective"] | None = option(
        None,
        "What backward computes again. full: whole layers, about a third more compute; selective: attention "
        "scores only.",
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        None,
        "full only. uniform: all layers, in chunks of --recompute-num-layers, of which only the input is "
        "stored; block: only the first --recompute-num-layers layers, each by itself.",
    )
    recompute_num_layers: int | None = option(
        None,
        "full only. uniform: layers per chunk; block: layers that are recomputed. Default 1.",
        at_least=1,
    )
    recompute_offload: bool = option(
        False,
        "full only. Keep the stored inputs in CPU memory; needs GPUs. Costs a copy to the CPU and back.",
    )

    def check(self) -> None:
        """Resolve --recompute-activations to selective; refuse the flags of full without full."""
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
        """Raise ValueError for --recompute-offload on a device without memory of its own."""
        if self.recompute_offload and device != "cuda":
            raise option_error("--recompute-offload", "(given)", f"needs GPUs; this run is on the {device}")
