"""Published model shapes by the name that --model-preset takes, as values of ModelConfig's fields.

Sources: GPT-3 paper, table 2.1, for GPT-2 and GPT-3 (gpt3-175b is 175b; 345m is Megatron-LM's GPT-2, 18b that
of the ZeRO++ tutorial); for the others config.json of the Hugging Face repository that a comment names.
`seq_length` is the length of samples in the longest phase of pretraining (Llama 2 paper, 2.2; Llama 3 paper,
3.4.1; Qwen3 report, 3.2; SmolLM2 paper, section 4).
"""

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


_LLAMA3: dict[str, Any] = {"rotary_base": 500_000.0, "use_rope_scaling": True}
_QWEN3: dict[str, Any] = {
    "kv_channels": 128,
    "rotary_base": 1_000_000.0,
    "norm_epsilon": 1e-6,
    "qk_layernorm": True,
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
    "llama2-7b": _llama_like(
        *(32, 4096, 32, 32, 11008, 4096, 4096), untie_embeddings_and_output_weights=True
    ),
    # meta-llama/Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B and Llama-3.1-70B
    "llama3.2-1b": _llama_like(16, 2048, 32, 8, 8192, 8192, 131072, rope_scaling_factor=32.0, **_LLAMA3),
    "llama3.2-3b": _llama_like(28, 3072, 24, 8, 8192, 8192, 131072, rope_scaling_factor=32.0, **_LLAMA3),
    "llama3.1-8b": _llama_like(
        *(32, 4096, 32, 8, 14336, 8192, 131072),
        rope_scaling_factor=8.0,
        untie_embeddings_and_output_weights=True,
        **_LLAMA3,
    ),
    "llama3.1-70b": _llama_like(
        *(80, 8192, 64, 8, 28672, 8192, 131072),
        rope_scaling_factor=8.0,
        untie_embeddings_and_output_weights=True,
        **_LLAMA3,
    ),
    # mistralai/Mistral-7B-v0.3
    "mistral-7b": _llama_like(
        *(32, 4096, 32, 8, 14336, 8192, 32768),
        rotary_base=1_000_000.0,
        untie_embeddings_and_output_weights=True,
    ),
    # Qwen/Qwen3-0.6B-Base and Qwen3-1.7B-Base
    "qwen3-0.6b": _llama_like(28, 1024, 16, 8, 3072, 4096, 32768, **_QWEN3),
    "qwen3-1.7b": _llama_like(28, 2048, 16, 8, 6144, 4096, 32768, **_QWEN3),
    # HuggingFaceTB/SmolLM2-135M and SmolLM2-1.7B
    "smollm2-135m": _llama_like(
        *(30, 576, 9, 3, 1536, 2048, 8192), rotary_base=100_000.0, init_method_std=0.041666666666666664
    ),
    "smollm2-1.7b": _llama_like(24, 2048, 32, 32, 8192, 2048, 8192, rotary_base=130_000.0),
}

# Entries of the published tokenizers, by the first letters of a preset: what a plan without one assumes.
VOCABULARIES = {
    "llama2": 32000,
    "llama3": 128256,
    "mistral": 32768,
    "qwen3": 151936,
    "smollm2": 49152,
    "": 50257,  # GPT-2's, which GPT-3 has too
}


def vocabulary_of(preset: str) -> int:
    """Entries of the tokenizer with which a preset was published; GPT-2's for other names."""
    return next(entries for start, entries in VOCABULARIES.items() if preset.startswith(start))
