"""Small models of transformers' Llama-like families, on shapes that nothing divides, and ours beside them."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron_zpp.checkpoint.huggingface.architecture import read_architecture
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.model.gpt import GPT

VOCAB = 1001
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16}
PHI: dict[str, Any] = {
    "hidden_size": 120,
    "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + pair / 20 for pair in range(15)],
        "long_factor": [2.0 + pair / 2 for pair in range(15)],
    },
}


@dataclasses.dataclass(frozen=True)
class Family:
    config: type[transformers.PreTrainedConfig]
    settings: dict[str, Any]

    def model(self, seed: int = 1) -> "transformers.PreTrainedModel":
        """With random norms and biases too, which would be 1 and 0."""
        shape = {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 72,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 40,
            "max_position_embeddings": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "attn_implementation": "eager",
        }
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(self.config(**shape | self.settings))
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.data = torch.randn(parameter.shape) * 0.2 + ("norm" in name)
            else:
                parameter.data *= 5  # so that positions and gates matter
        return model.eval()


FAMILIES = {
    "llama": Family(transformers.LlamaConfig, {}),
    "llama-tied-scaled": Family(
        transformers.LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": SCALED}
    ),
    "llama-biased": Family(
        transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3}
    ),
    "smollm": Family(  # SmolLM2-135M's numbers of heads and groups
        transformers.LlamaConfig,
        {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        },
    ),
    "mistral": Family(transformers.MistralConfig, {"sliding_window": None}),
    "mistral-tied": Family(transformers.MistralConfig, {"sliding_window": None, "tie_word_embeddings": True}),
    "mistral-window": Family(transformers.MistralConfig, {"sliding_window": 9}),
    "mistral-small": Family(  # whose heads are narrower than --hidden-size / --num-attention-heads
        transformers.MistralConfig,
        {"hidden_size": 60, "head_dim": 8, "sliding_window": None, "rope_theta": 1e8},
    ),
    "starcoder2": Family(transformers.Starcoder2Config, {"tie_word_embeddings": False}),
    "starcoder2-window": Family(
        transformers.Starcoder2Config,
        {"hidden_size": 120, "sliding_window": 9, "rope_parameters": {"rope_theta": 1e5}},
    ),
    "qwen2": Family(transformers.Qwen2Config, {}),
    "qwen2-tied": Family(transformers.Qwen2Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2-window": Family(
        transformers.Qwen2Config,
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": Family(transformers.Qwen3Config, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen3-tied": Family(transformers.Qwen3Config, {"tie_word_embeddings": True}),
    "olmo2": Family(transformers.Olmo2Config, {"hidden_size": 120}),
    "olmo3": Family(
        transformers.Olmo3Config,
        {
            "hidden_size": 120,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "pad_token_id": None,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT | {"rope_theta": 5e5}},
        },
    ),
    "phi3": Family(  # whose texts in tests are longer than the original ones
        transformers.Phi3Config, PHI | {"original_max_position_embeddings": 16, "sliding_window": 30}
    ),
    "phi4-mini": Family(
        transformers.Phi3Config,
        PHI | {"original_max_position_embeddings": 64, "tie_word_embeddings": True},
    ),
    "glm": Family(transformers.GlmConfig, {"pad_token_id": None}),
    "glm4": Family(
        transformers.Glm4Config, {"pad_token_id": None, "attention_bias": False, "rope_parameters": DEFAULT}
    ),
    "qwen3-yarn": Family(
        transformers.Qwen3Config, {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}}
    ),
    "granite": Family(
        transformers.GraniteConfig,
        {
            "hidden_size": 120,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.125,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": Family(
        transformers.SmolLM3Config, {"hidden_size": 120, "no_rope_layers": [1, 0], "pad_token_id": None}
    ),
    "gemma2": Family(
        transformers.Gemma2Config,
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 50,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "pad_token_id": None,
        },
    ),
    "gemma3": Family(
        transformers.Gemma3TextConfig,
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 50,
            "pad_token_id": None,  # whose row would be zeros
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3-full": Family(
        transformers.Gemma3TextConfig,
        {"layer_types": ["full_attention"] * 2, "final_logit_softcapping": 2.0},
    ),
    "qwen3-window": Family(
        transformers.Qwen3Config,
        {
            "use_sliding_window": True,
            "sliding_window": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def ours(directory: Path) -> GPT:
    """Our model with the weights that save_pretrained wrote to `directory`."""
    named = NamedDirectory("HF_DIR", str(directory), directory)
    found = read_architecture(named)
    with HuggingFaceWeights(named, found.model, found.vocab_size) as weights:
        model = GPT(found.model, found.vocab_size)
        model.load_state_dict(weights.parameters(), assign=True)
    return model.eval()
