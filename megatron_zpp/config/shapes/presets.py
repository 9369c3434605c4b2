"""Published model shapes by the name that --model-preset takes, as values of ModelConfig's fields.

Sources: GPT-3 paper, table 2.1, for GPT-2 and GPT-3 (gpt3-175b is 175b; 345m is Megatron-LM's GPT-2, 18b that
of the ZeRO++ tutorial); for the others config.json of the Hugging Face repository that a comment names.
`seq_length` is the length of samples in the longest phase of pretraining (Llama 2 paper, 2.2; Llama 3 paper,
3.4.1; Qwen3 report, 3.2; SmolLM2 paper, section 4; SmolLM3's blog; OLMo 2 paper, 2; Gemma 2 and 3 reports, 2;
Phi-3 report, 2; StarCoder2 paper, 6; Granite 3.0 report; Mistral 7B paper, table 1, also for Mistral Small;
Olmo 3 report, 3; not published for Phi-4 mini and GLM-4).
"""

import math
from typing import Any


def _gpt(layers: int, hidden: int, heads: int, length: int) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": length}


def _llama_like(
    layers: int, hidden: int, heads: int, groups: int, inner: int, length: int, positions: int, **other: Any
) -> dict[str, Any]:
    return {
        **_gpt(layers, hidden, heads, length),
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "ffn_hidden_size": inner,
        "max_position_embeddings": positions,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **other,
    }


_UNTIED: dict[str, Any] = {"untie_embeddings_and_output_weights": True}
_LLAMA3: dict[str, Any] = {"rotary_base": 500_000.0, "use_rope_scaling": True}
_QWEN3: dict[str, Any] = {
    "kv_channels": 128,
    "rotary_base": 1_000_000.0,
    "norm_epsilon": 1e-6,
    "qk_layernorm": True,
}
_OLMO2: dict[str, Any] = {
    "rotary_base": 500_000.0,
    "norm_epsilon": 1e-6,
    "norm_placement": "after",
    "qk_layernorm": True,
    "qk_layernorm_across_heads": True,
    **_UNTIED,
}
_OLMO3: dict[str, Any] = _OLMO2 | {
    "position_embedding_type": "yarn",
    "yarn_original_max_position_embeddings": 8192,
    "rotary_scaling_factor": 8.0,
    "rotary_base_local": 500_000.0,
    "window_size": "4095,0",
    "window_attn_skip_freq": "4",
}
_PHI4_MINI: dict[str, Any] = {
    "position_embedding_type": "longrope",
    "rotary_percent": 0.75,
    "yarn_original_max_position_embeddings": 4096,
    "longrope_short_factor": (1.0,) * 48,
    "longrope_long_factor": (
        *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649),
        *(2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845),
        *(5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158),
        *(11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105),
        *(25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71),
        *(32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
    ),
}
_GLM4: dict[str, Any] = {
    "kv_channels": 128,
    "rotary_percent": 0.5,
    "rotary_interleaved": True,
    "norm_placement": "both",
    "add_qkv_bias": True,
}
_GRANITE3: dict[str, Any] = {
    "rotary_base": 10_000_000.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
}
_STRETCHED: dict[str, Any] = {"rotary_seq_len_interpolation_factor": 8.0}
_STARCODER2: dict[str, Any] = {
    "normalization": "LayerNorm",
    "swiglu": False,
    "disable_bias_linear": False,
    "window_size": "4095,0",
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
}


def _gemma(layers: int, hidden: int, heads: int, groups: int, inner: int, **other: Any) -> dict[str, Any]:
    """The text of a Gemma 3, whose sixth layers have no window; a Gemma 2 with other values."""
    length, positions = other.pop("seq_length", 32768), other.pop("max_position_embeddings", 131072)
    gemma = {
        "swiglu": False,
        "geglu": True,
        "kv_channels": 256,
        "norm_epsilon": 1e-6,
        "norm_placement": "both",
        "apply_layernorm_1p": True,
        "qk_layernorm": True,
        "embedding_multiplier": math.sqrt(hidden),
        "softmax_scale": 256**-0.5,
        "window_size": "1023,0",
        "window_attn_skip_freq": "6",
        "rotary_base": 1_000_000.0,
        "rotary_base_local": 10_000.0,
    }
    return _llama_like(layers, hidden, heads, groups, inner, length, positions, **gemma | other)


_GEMMA2: dict[str, Any] = {
    "seq_length": 8192,
    "max_position_embeddings": 8192,
    "qk_layernorm": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "window_size": "4095,0",
    "window_attn_skip_freq": "2",
    "rotary_base": 10_000.0,
    "rotary_base_local": None,
}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-125m": _gpt(12, 768, 12, 1024),
    "345m": _gpt(24, 1024, 16, 1024),
    "760m": _gpt(24, 1536, 16, 1024),
    "1.3b": _gpt(24, 2048, 16, 1024),
    "2.7b": _gpt(32, 2560, 32, 2048),
    "6.7b": _gpt(32, 4096, 32, 2048),
    "13b": _gpt(40, 5120, 40, 2048),
    "18b": _gpt(40, 6144, 32, 512),
    "175b": _gpt(96, 12288, 96, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
    # meta-llama/Llama-2-7b-hf
    "llama2-7b": _llama_like(32, 4096, 32, 32, 11008, 4096, 4096, **_UNTIED),
    # meta-llama/Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B and Llama-3.1-70B
    "llama3.2-1b": _llama_like(16, 2048, 32, 8, 8192, 8192, 131072, rope_scaling_factor=32.0, **_LLAMA3),
    "llama3.2-3b": _llama_like(28, 3072, 24, 8, 8192, 8192, 131072, rope_scaling_factor=32.0, **_LLAMA3),
    "llama3.1-8b": _llama_like(
        *(32, 4096, 32, 8, 14336, 8192, 131072), rope_scaling_factor=8.0, **_LLAMA3 | _UNTIED
    ),
    "llama3.1-70b": _llama_like(
        *(80, 8192, 64, 8, 28672, 8192, 131072), rope_scaling_factor=8.0, **_LLAMA3 | _UNTIED
    ),
    # mistralai/Mistral-7B-v0.3 and Mistral-Small-24B-Base-2501
    "mistral-7b": _llama_like(32, 4096, 32, 8, 14336, 8192, 32768, rotary_base=1e6, **_UNTIED),
    "mistral-small-24b": _llama_like(
        *(40, 5120, 32, 8, 32768, 8192, 32768), kv_channels=128, rotary_base=1e8, **_UNTIED
    ),
    # Qwen/Qwen3-0.6B-Base to Qwen3-14B-Base, and Qwen3-32B, which has no base
    "qwen3-0.6b": _llama_like(28, 1024, 16, 8, 3072, 4096, 32768, **_QWEN3),
    "qwen3-1.7b": _llama_like(28, 2048, 16, 8, 6144, 4096, 32768, **_QWEN3),
    "qwen3-4b": _llama_like(36, 2560, 32, 8, 9728, 4096, 32768, **_QWEN3),
    "qwen3-8b": _llama_like(36, 4096, 32, 8, 12288, 4096, 32768, **_QWEN3 | _UNTIED),
    "qwen3-14b": _llama_like(40, 5120, 40, 8, 17408, 4096, 32768, **_QWEN3 | _UNTIED),
    "qwen3-32b": _llama_like(64, 5120, 64, 8, 25600, 4096, 40960, **_QWEN3 | _UNTIED),
    # HuggingFaceTB/SmolLM2-135M and SmolLM2-1.7B
    "smollm2-135m": _llama_like(
        *(30, 576, 9, 3, 1536, 2048, 8192), rotary_base=100_000.0, init_method_std=0.041666666666666664
    ),
    "smollm2-1.7b": _llama_like(24, 2048, 32, 32, 8192, 2048, 8192, rotary_base=130_000.0),
    # HuggingFaceTB/SmolLM3-3B-Base
    "smollm3-3b": _llama_like(
        *(36, 2048, 16, 4, 11008, 4096, 65536), rotary_base=5e6, norm_epsilon=1e-6, no_rope_freq="4"
    ),
    # allenai/OLMo-2-0425-1B, OLMo-2-1124-7B, OLMo-2-1124-13B and OLMo-2-0325-32B
    "olmo2-1b": _llama_like(16, 2048, 16, 16, 8192, 4096, 4096, **_OLMO2),
    "olmo2-7b": _llama_like(32, 4096, 32, 32, 11008, 4096, 4096, **_OLMO2),
    "olmo2-13b": _llama_like(40, 5120, 40, 40, 13824, 4096, 4096, **_OLMO2),
    "olmo2-32b": _llama_like(64, 5120, 40, 8, 27648, 4096, 4096, **_OLMO2),
    # allenai/Olmo-3-1025-7B and Olmo-3-1125-32B
    "olmo3-7b": _llama_like(32, 4096, 32, 32, 11008, 8192, 65536, **_OLMO3),
    "olmo3-32b": _llama_like(64, 5120, 40, 8, 27648, 8192, 65536, **_OLMO3),
    # ibm-granite/granite-3.3-2b-base and granite-3.3-8b-base
    "granite3.3-2b": _llama_like(
        *(40, 2048, 32, 8, 8192, 4096, 131072), softmax_scale=1 / 64, logits_multiplier=1 / 8, **_GRANITE3
    ),
    "granite3.3-8b": _llama_like(
        *(40, 4096, 32, 8, 12800, 4096, 131072), softmax_scale=1 / 128, logits_multiplier=1 / 16, **_GRANITE3
    ),
    # google/gemma-2-2b, gemma-2-9b and gemma-2-27b
    "gemma2-2b": _gemma(26, 2304, 8, 4, 9216, **_GEMMA2),
    "gemma2-9b": _gemma(42, 3584, 16, 8, 14336, **_GEMMA2),
    "gemma2-27b": _gemma(46, 4608, 32, 16, 36864, kv_channels=128, softmax_scale=144**-0.5, **_GEMMA2),
    # google/gemma-3-1b-pt, and the text of gemma-3-4b-pt, gemma-3-12b-pt and gemma-3-27b-pt
    "gemma3-1b": _gemma(26, 1152, 4, 1, 6912, window_size="511,0", max_position_embeddings=32768),
    "gemma3-4b": _gemma(34, 2560, 8, 4, 10240, **_STRETCHED),
    "gemma3-12b": _gemma(48, 3840, 16, 8, 15360, **_STRETCHED),
    "gemma3-27b": _gemma(62, 5376, 32, 16, 21504, kv_channels=128, softmax_scale=168**-0.5, **_STRETCHED),
    # THUDM/GLM-4-9B-0414
    "glm4-9b": _llama_like(40, 4096, 32, 2, 13696, 8192, 32768, **_GLM4 | _UNTIED),
    # microsoft/Phi-3-mini-4k-instruct and Phi-4-mini-instruct
    "phi3-mini": _llama_like(32, 3072, 32, 32, 8192, 4096, 4096, window_size="2046,0", **_UNTIED),
    "phi4-mini": _llama_like(32, 3072, 24, 8, 8192, 4096, 131072, **_PHI4_MINI),
    # bigcode/starcoder2-3b, starcoder2-7b and starcoder2-15b
    "starcoder2-3b": _llama_like(
        *(30, 3072, 24, 2, 12288, 4096, 16384),
        rotary_base=999999.4420358813,
        init_method_std=0.018042,
        **_STARCODER2,
    ),
    "starcoder2-7b": _llama_like(
        *(32, 4608, 36, 4, 18432, 4096, 16384), rotary_base=1e6, init_method_std=0.018042, **_STARCODER2
    ),
    "starcoder2-15b": _llama_like(
        *(40, 6144, 48, 4, 24576, 4096, 16384),
        rotary_base=1e5,
        init_method_std=0.01275,
        **_STARCODER2 | _UNTIED,
    ),
}

# Rows of the published tables, by the first letters of a preset: what a plan without a tokenizer assumes.
VOCABULARIES = {
    "gemma2": 256000,
    "gemma3-1b": 262144,
    "gemma3": 262208,
    "glm4": 151552,
    "granite3": 49159,
    "llama2": 32000,
    "llama3": 128256,
    "mistral-small": 131072,
    "mistral": 32768,
    "olmo2": 100352,
    "olmo3": 100278,
    "phi3": 32064,
    "phi4": 200064,
    "qwen3": 151936,
    "smollm2": 49152,
    "smollm3": 128256,
    "starcoder2": 49152,
    "": 50257,  # GPT-2's, which GPT-3 has too
}


def vocabulary_of(preset: str) -> int:
    """Rows of the table with which a preset was published; GPT-2's for other names."""
    return next(entries for start, entries in VOCABULARIES.items() if preset.startswith(start))


def preset_names() -> str:
    """All presets for a person, those of a family in one word: qwen3-0.6b/1.7b/4b."""
    families: dict[str, list[str]] = {}
    for name in PRESETS:
        family, dash, size = name.rpartition("-")
        families.setdefault(family + dash, []).append(size)
    return ", ".join(
        ", ".join(sizes) if family == "" else family + "/".join(sizes) for family, sizes in families.items()
    )
