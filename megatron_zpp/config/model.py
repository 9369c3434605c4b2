"""The transformer: shape, regularisation, attention kernel, and activation recomputation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_zpp.config.options import Options, count, option, option_error, optional, switch
from megatron_zpp.config.positions import OF_ONE_ROTARY, OF_ROTARY, ROTARY, PositionConfig
from megatron_zpp.config.shapes.presets import PRESETS, preset_names
from megatron_zpp.config.sizes import WIDEST
from megatron_zpp.config.values.attention_window import (
    FREQUENCY,
    SIZE,
    describe_pattern,
    parse_pattern,
    parse_window,
)

NormPlacement = Literal["before", "after", "both"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
Normalization = Literal["LayerNorm", "RMSNorm"]
AttentionBackend = Literal[
    "auto", "math", "efficient", "flash", "cudnn", "flex", "flash3", "fused", "unfused", "local"
]

# Fields of ModelConfig that a run chooses for a published shape, unless a preset has them.
NOT_SHAPE = (
    "seq_length",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "padded_vocab_size",
)

_ACTIVATIONS = ("swiglu", "geglu", "squared_relu")  # of the MLP, of which a model has one, or GELU
REQUIRED_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
_FULL, _MUP = "--recompute-granularity full", "--use-mup"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(PositionConfig):
    """model: the shape of the transformer"""

    qk_layernorm: bool = switch(
        "Normalise each head of queries and keys before attention, with --normalization."
    )
    qk_layernorm_across_heads: bool = switch(
        "Normalise all heads of a token together (OLMo 2).", needs="--qk-layernorm"
    )
    softmax_scale: float | None = optional(
        "Factor of attention's scores; default 1 / √(--kv-channels).", above=0
    )
    attn_logit_softcapping: float | None = optional(
        "Bound scaled scores to ± this, by c · tanh(score / c) (Gemma 2).", above=0
    )
    softmax_type: SoftmaxType = option(
        "vanilla",
        "What else the softmax of attention sums, without a value. off-by-one: 1; learnable: exp of a weight "
        "per head (attention sinks, GPT-OSS).",
    )
    window_size: str | None = optional(
        "Sliding window of attention as LEFT,0: a token attends to itself and to LEFT tokens before it; -1: "
        "to all of them. Default: no window.",
        metavar="LEFT,0",
    )
    window_attn_skip_freq: str | None = optional(
        "Layers without the window: each N-th one, or a Python list with a 1 (window) or 0 (none) per layer, "
        'such as "([1]*5+[0])*4". Default: all layers have it.'
    )
    normalization: Normalization = option(
        None, "Normalisation before attention, MLP and output; default LayerNorm.", implied="LayerNorm"
    )
    norm_placement: NormPlacement = option(
        None,
        "Where attention and MLP have norms: before them, after them, before the residual sum (OLMo 2), or "
        "both (Gemma); default before.",
        implied="before",
    )
    apply_layernorm_1p: bool = switch("Norms multiply by 1 + their weights, which begin at zero (Gemma).")
    fp32_residual_connection: bool = switch(
        "With --bf16 or --fp16: the sum that embedding and layers add to is in fp32. Norms read it in fp32."
    )
    embed_layernorm: bool = switch(
        "Normalise what the token embedding looks up, with --normalization (BLOOM)."
    )
    norm_epsilon: float = option(None, "Added to the variance in norms; default 1e-5.", implied=1e-5, above=0)
    swiglu: bool = switch("Gated MLP: SiLU of one projection times another (Llama).")
    geglu: bool = switch("Gated MLP: GELU of one projection times another (Gemma).")
    squared_relu: bool = switch("Squared ReLU in the MLP instead of GELU.")
    disable_bias_linear: bool = switch("No biases in attention and MLP.")
    add_qkv_bias: bool = switch(
        "Biases of queries, keys and values in spite of --disable-bias-linear (Qwen2)."
    )
    make_vocab_size_divisible_by: int = count(
        128, "Pad the vocabulary to a multiple of this.", at_most=WIDEST
    )
    padded_vocab_size: int | None = count(
        None,
        "Rows of the vocabulary that take part in the softmax; default: one per entry of the tokenizer. "
        "Published models may have more (Qwen's 151936).",
        at_most=2**31 - 1,
    )
    untie_embeddings_and_output_weights: bool = switch(
        "Give the output layer separate weights instead of sharing the token embedding's."
    )
    embedding_multiplier: float = option(
        None,
        "Factor of what the token embedding looks up; default 1 (Gemma: √(--hidden-size)).",
        implied=1.0,
        above=0,
    )
    residual_multiplier: float = option(
        None,
        "Factor of what attention and MLP add to the residual stream; default 1 (Granite).",
        implied=1.0,
        above=0,
    )
    logits_multiplier: float = option(
        None, "Factor of the logits; default 1 (Granite: 1 / logits_scaling).", implied=1.0, above=0
    )
    final_logit_softcapping: float | None = optional(
        "Soft cap C of the logits: C · tanh(logits / C) (Gemma 2); default: none.", above=0
    )
    init_method_std: float = option(
        None,
        "Standard deviation of initial weights; default 0.02. Divided by √(2 × layers) where a matrix writes "
        "to the residual stream.",
        implied=0.02,
        above=0,
    )
    use_mup: bool = switch(
        "Maximal update parametrisation (muP): a learning rate found at one width holds at others. With m = "
        "--hidden-size / --mup-base-hidden-size, initial weights of layers are divided by √m, learning rate "
        "and --adam-eps of their matrices by m, and logits by m. Sets --softmax-scale and "
        "--logits-multiplier, unless they are given."
    )
    mup_base_hidden_size: int | None = count(
        None, "Width at which the learning rate was found; default --hidden-size.", needs=_MUP, at_most=WIDEST
    )
    mup_base_head_dim: float | None = optional(
        "Head width at which --softmax-scale is 1 / √(--kv-channels); default 1.", needs=_MUP, above=0
    )
    mup_attn_scale_power: float | None = optional(
        "--softmax-scale is √(--mup-base-head-dim) / --kv-channels to this power; default 1.",
        needs=_MUP,
        at_least=0,
        at_most=2,
    )
    attention_dropout: float = option(
        None, "Dropout probability of attention weights; default 0.1.", implied=0.1, at_least=0, below=1
    )
    hidden_dropout: float = option(
        None, "Dropout probability of hidden states; default 0.1.", implied=0.1, at_least=0, below=1
    )

    def check(self) -> None:
        """Fill fields that a preset or another field implies, then refuse shapes that cannot be built."""
        self._obey_preset()
        for name in REQUIRED_SHAPE:
            if getattr(self, name) is None:
                raise self.error(name, f"give it, or --model-preset with one of {preset_names()}")
        self.fill_implied()
        self.fill("max_position_embeddings", self.seq_length)
        width = 4 * self.hidden_size
        inner = max(64, int(width * 2 / 3 / 64) * 64) if self.gated else width  # Megatron-LM's rule
        self.fill("ffn_hidden_size", inner)
        self.check_alternatives(*_ACTIVATIONS)
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise self.error(
                "num_attention_heads",
                f"must divide --hidden-size {self.hidden_size}, or give --kv-channels",
            )
        self.fill("kv_channels", self.hidden_size // self.num_attention_heads)
        self.check_groups()
        self._check_window()
        self.check_positions()
        if self.use_mup:
            self._check_mup()

    @property
    def activation(self) -> str:
        """The MLP's activation function, by the name of its flag; "gelu" without one."""
        return next(iter(self._given_activations()), "gelu")

    @property
    def gated(self) -> bool:
        """Whether the MLP's first linear map makes a gate and a value, each of --ffn-hidden-size."""
        return self.swiglu or self.geglu

    @property
    def width_ratio(self) -> float:
        """muP's ratio of the width to the base width; 1 without --use-mup."""
        return self.hidden_size / self.mup_base_hidden_size if self.mup_base_hidden_size else 1.0

    @property
    def changed_scores(self) -> str:
        """The first flag for which attention does more with scores than scale them; empty if there is none.

        Not every kernel of attention can.
        """
        if self.attn_logit_softcapping is not None:
            return "--attn-logit-softcapping"
        if self.softmax_type != "vanilla":
            return f"--softmax-type {self.softmax_type}"
        return "--position-embedding-type alibi" if self.position_embedding_type == "alibi" else ""

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The tokens that a token of each layer attends to, itself included; None stands for all."""
        if self.window_size is None:
            return (None,) * self.num_layers
        window, pattern = parse_window(self.window_size), self.window_attn_skip_freq
        windowed = parse_pattern(pattern, self.num_layers) if pattern else (True,) * self.num_layers
        return tuple(window if one else None for one in windowed)

    def vocabulary(self, entries: int) -> int:
        """Return the rows that take part in the softmax, of a tokenizer with `entries`; at least as many.

        Raises ValueError that names --padded-vocab-size if it is too small.
        """
        if self.padded_vocab_size is not None and self.padded_vocab_size < entries:
            raise self.error("padded_vocab_size", f"must be at least {entries}, the tokenizer's entries")
        return self.padded_vocab_size or entries

    def embedding_rows(self, entries: int) -> int:
        """Return `vocabulary` rounded up to --make-vocab-size-divisible-by; the rest is zero and not used."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocabulary(entries) // multiple) * multiple

    def _obey_preset(self) -> None:
        if self.model_preset is None:
            return
        values = preset_fields(self.model_preset)
        if self.model_preset not in PRESETS:
            object.__setattr__(self, "model_preset", None)  # a checkpoint must not depend on the file
        kind = self.position_embedding_type
        if kind not in (None, values.get("position_embedding_type")):
            other = OF_ONE_ROTARY if kind in ROTARY else OF_ONE_ROTARY + OF_ROTARY
            values = {name: value for name, value in values.items() if name not in other}
        if self._given_activations():
            values = {name: value for name, value in values.items() if name not in _ACTIVATIONS}
        for name, value in values.items():
            self.fill(name, value)

    def _given_activations(self) -> list[str]:
        return [name for name in _ACTIVATIONS if getattr(self, name)]

    def _check_window(self) -> None:
        """Give both settings their shortest form, so that equal ones are equal."""
        window = parse_window(self.window_size) if self.window_size is not None else None
        pattern = self.window_attn_skip_freq
        if pattern is not None and window is None:
            raise option_error(FREQUENCY, pattern, f"needs {SIZE}")
        windowed = parse_pattern(pattern, self.num_layers) if pattern else (True,)
        size = f"{window - 1},0" if window is not None and any(windowed) else None
        object.__setattr__(self, "window_size", size)
        object.__setattr__(self, "window_attn_skip_freq", describe_pattern(windowed) if size else None)

    def _check_mup(self) -> None:
        """Fill multipliers that muP implies, by Megatron-LM's rules, so that each model states its own."""
        self.fill("mup_base_hidden_size", self.hidden_size)
        power = 1.0 if self.mup_attn_scale_power is None else self.mup_attn_scale_power
        self.fill("softmax_scale", math.sqrt(self.mup_base_head_dim or 1.0) / self.kv_channels**power)
        if self.logits_multiplier == 1:
            object.__setattr__(self, "logits_multiplier", 1 / self.width_ratio)
        if self.embedding_multiplier != 1 and self.position_embedding_type == "learned_absolute":
            fix = "scales tokens alone, and muP scales learned positions too; omit it or use rope"
            raise self.error("embedding_multiplier", fix)


def preset_fields(preset: str) -> Mapping[str, Any]:
    """Return the fields of ModelConfig that a preset, or a config.json or its directory, gives.

    Raises ValueError if there is no such preset or file.
    """
    if preset in PRESETS:
        return PRESETS[preset]
    from megatron_zpp.config.shapes.huggingface import CONFIG, describe_model
    from megatron_zpp.config.values.json_file import read_json_object

    flag, path = "--model-preset", Path(preset)
    if path.is_dir():
        path /= CONFIG
    if not path.exists():
        raise option_error(flag, preset, f"is neither a file nor a preset; use one of {preset_names()}")
    values = read_json_object(flag, str(path))
    try:
        return describe_model(values).fields
    except ValueError as error:
        raise option_error(flag, preset, str(error)) from None


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Options):
    """attention: which kernel computes it"""

    attention_backend: AttentionBackend = option(
        "auto",
        "Attention kernel. auto: the fastest for device, number format, scores and masks. math, efficient, "
        "flash, cudnn and flex: torch's. flash3: FlashAttention-3's package flash_attn_interface. fused: "
        "Megatron-LM's name for cudnn; unfused, local: its names for math. A named kernel that cannot be "
        "used is an error.",
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(Options):
    """recomputation: compute activations again in backward instead of storing them"""

    recompute_activations: bool = switch("Short for --recompute-granularity selective.")
    recompute_granularity: Literal["full", "selective"] | None = optional(
        "What backward computes again. full: whole layers, about a third more compute; selective: attention "
        "scores only."
    )
    recompute_method: Literal["uniform", "block"] | None = optional(
        "uniform: all layers, in chunks of --recompute-num-layers, of which only the input is "
        "stored; block: only the first --recompute-num-layers layers, each by itself.",
        needs=_FULL,
    )
    recompute_num_layers: int | None = count(
        None,
        "uniform: layers per chunk; block: layers that are recomputed. Default 1.",
        needs=_FULL,
        implied=1,
    )
    recompute_offload: bool = switch(
        "Keep the stored inputs in CPU memory; needs GPUs. Costs a copy to the CPU and back.", needs=_FULL
    )
    mlp_chunks_for_training: int = count(
        1,
        "Compute norm and MLP of each layer in so many chunks of tokens, and again in the backward, chunk by "
        "chunk (TiledMLP of ALST): only the MLP's input is stored. For long samples.",
    )

    def check(self) -> None:
        """Resolve --recompute-activations to selective, and require a method of full."""
        if self.recompute_activations:
            if self.recompute_granularity == "full":
                raise self.error("recompute_granularity", "contradicts --recompute-activations; give one")
            object.__setattr__(self, "recompute_granularity", "selective")
        if self.recompute_granularity == "full":
            if self.recompute_method is None:
                raise self.error("recompute_granularity", "needs --recompute-method uniform or block")
            self.fill_implied()

    def check_device(self, device: str) -> None:
        """Raise ValueError for --recompute-offload on a device without memory of its own."""
        if self.recompute_offload and device != "cuda":
            raise self.error("recompute_offload", f"needs GPUs; this run is on the {device}")
