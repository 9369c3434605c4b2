"""Small models of transformers' families, on shapes that nothing divides, and ours beside them.

`python -m tests.model.families` writes which of them have which piece, for the site (docs/site/families.py).
"""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from docs.site.families import CASES
from megatron_zpp.checkpoint.huggingface.architecture import read_architecture
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.config.model import NOT_SHAPE, ModelConfig
from megatron_zpp.config.positions import OF_ROTARY
from megatron_zpp.config.shapes.huggingface import describe_model
from megatron_zpp.config.sizes import SizeConfig
from megatron_zpp.model.gpt import GPT

VOCAB = 1001
SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
BOTH_KINDS = ["sliding_attention", "full_attention"]  # of layers
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

    def describe(self) -> transformers.PreTrainedConfig:
        """Its config.json."""
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
        return self.config(**shape | self.settings)

    def model(self, seed: int = 1) -> "transformers.PreTrainedModel":
        """With random norms and biases too, which would be 1 and 0."""
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(self.describe())
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.data = torch.randn(parameter.shape) * 0.2 + ("norm" in name)
            else:
                parameter.data *= 5  # so that positions and gates matter
        return model.eval()


def with_images(text: transformers.PreTrainedConfig) -> "transformers.PreTrainedModel":
    """The model of text and images whose text is that of a Gemma 3 or a Mistral."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"image_size": 28, "patch_size": 14}
    kind, vision = transformers.Gemma3Config, "siglip_vision_model"
    more: dict[str, Any] = {"mm_tokens_per_image": 4}
    if text.model_type == "mistral":
        kind, vision, more = transformers.Mistral3Config, "pixtral", {"tie_word_embeddings": False}
    config = kind(text_config=text.to_dict(), vision_config={"model_type": vision} | small, **more)
    return transformers.AutoModelForImageTextToText.from_config(config)


FAMILIES = {
    "gpt2": Family(transformers.GPT2Config, {}),
    "bloom": Family(transformers.BloomConfig, {"seq_length": 64}),
    "bloom-heads": Family(
        transformers.BloomConfig,
        {"hidden_size": 60, "num_attention_heads": 5, "seq_length": 64, "tie_word_embeddings": False},
    ),
    "llama": Family(transformers.LlamaConfig, {}),
    "llama-tied-scaled": Family(
        transformers.LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": SCALED}
    ),
    "llama-biased": Family(
        transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3}
    ),
    "smollm": Family(  # SmolLM2-135M's numbers of heads and groups
        transformers.LlamaConfig,
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
        | {"tie_word_embeddings": True, "rope_parameters": DEFAULT | {"rope_theta": 1e5}},
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
            "layer_types": BOTH_KINDS,
            "pad_token_id": None,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT | {"rope_theta": 5e5}},
        },
    ),
    "phi3": Family(  # whose texts in tests are longer than the original ones
        transformers.Phi3Config, PHI | {"original_max_position_embeddings": 14, "sliding_window": 30}
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
        {"hidden_size": 120, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.125, "logits_scaling": 8.0, "tie_word_embeddings": True},
    ),
    "smollm3": Family(
        transformers.SmolLM3Config, {"hidden_size": 120, "no_rope_layers": [1, 0], "pad_token_id": None}
    ),
    "gemma2": Family(
        transformers.Gemma2Config,
        {"sliding_window": 9, "query_pre_attn_scalar": 50, "pad_token_id": None}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": Family(
        transformers.Gemma3TextConfig,
        {
            "sliding_window": 9,
            "layer_types": BOTH_KINDS,
            "query_pre_attn_scalar": 50,
            "final_logit_softcapping": 2.0,
            "pad_token_id": None,  # whose row would be zeros
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3-full": Family(transformers.Gemma3TextConfig, {"layer_types": ["full_attention"] * 2}),
    "qwen3-window": Family(
        transformers.Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 2, "layer_types": BOTH_KINDS},
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


def cases_of_pieces() -> str:
    """A line for each field of ModelConfig that is no size, with the families that are no GPT-2 in it."""
    sizes = {field.name for field in dataclasses.fields(SizeConfig)} - {"kv_channels", "num_query_groups"}
    pieces = [
        field.name for field in dataclasses.fields(ModelConfig) if field.name not in {*sizes, *NOT_SHAPE}
    ]
    found: dict[str, list[str]] = {piece: [] for piece in pieces}
    for case, family in FAMILIES.items():
        model = ModelConfig(**describe_model(family.describe().to_dict()).fields, seq_length=16)
        gpt = {name: getattr(model, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
        plain = ModelConfig(**gpt, seq_length=16)
        rope = replace(plain, position_embedding_type="rope")
        for piece in pieces:
            usual = rope if piece in OF_ROTARY and model.rotary else plain
            if getattr(model, piece) != getattr(usual, piece):
                found[piece].append(case)
    return "".join(f"{' '.join([piece, *cases])}\n" for piece, cases in found.items())


if __name__ == "__main__":
    CASES.write_text(cases_of_pieces())
