"""What a config.json asks for that is not here: named from its keys, whatever its model_type is called."""

from collections.abc import Mapping
from typing import Any

from megatron_zpp.config.values.json_file import shown

# The first key that is there stands for the feature.
_FEATURES = {
    "mixture of experts": (
        *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        "moe_intermediate_size",
    ),
    "multi-latent attention": ("kv_lora_rank",),
    "layers without attention": (
        *("mamba_d_state", "mamba_expand", "ssm_state_size", "state_size", "linear_conv_kernel_dim"),
        *("linear_attn_alpha_factor", "conv_L_cache", "lru_width", "hybrid_override_pattern"),
    ),
    "embeddings per layer": ("hidden_size_per_layer_input",),
    "images beside text": ("vision_config",),
    "an encoder beside the decoder": ("is_encoder_decoder",),
}


def unsupported_features(values: Mapping[str, Any]) -> str:
    """Return the features of a config.json that are not here, each with its key; empty if none is known.

    A model of text and images has its text's keys in `text_config`.
    """
    nested = [values[key] for key in ("text_config", "ffn_config") if isinstance(values.get(key), dict)]
    keys = {key: value for each in (*nested, values) for key, value in each.items()}
    found = []
    for feature, names in _FEATURES.items():
        there = next((name for name in names if _has(keys.get(name))), None)
        if there is not None:
            value = "" if isinstance(keys[there], dict) else f" {shown(keys[there])}"
            found.append(f"{feature} ({there}{value})")
    return ", ".join(found)


def _has(value: Any) -> bool:
    """Whether a key says that the feature is there: 0 or 1 of something is none of it."""
    return value is True or value not in (None, False, 0, 1)
