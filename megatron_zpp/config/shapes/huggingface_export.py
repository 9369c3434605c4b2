"""Hugging Face's config.json that describes a ModelConfig: of the first family that computes the same."""

import math
from typing import Any

from megatron_zpp.config.model import NOT_SHAPE, ModelConfig
from megatron_zpp.config.options import flag_of
from megatron_zpp.config.shapes.huggingface import describe_model
from megatron_zpp.config.shapes.huggingface_families import FAMILIES, Family
from megatron_zpp.config.shapes.huggingface_rope import rope_keys
from megatron_zpp.config.shapes.huggingface_window import window_keys

_NOT_COMPUTED = (  # fields without which two models compute the same, or that others say
    *(*NOT_SHAPE, "model_preset", "group_query_attention", "rotary_ntk_factor", "mscale_all_dim"),
    "fp32_residual_connection",  # as --bf16, which config.json does not say either
    *("use_mup", "mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power"),
)


def huggingface_values(model: ModelConfig, vocab_size: int, eod: int) -> dict[str, Any]:
    """Return a config.json that describes the model, for the first family of FAMILIES that can.

    Raises ValueError, with the fields that the family loses which loses the fewest, if none can.
    """
    rotary = model.rotary
    losses = {}
    for model_type, family in FAMILIES.items():
        if family.like_gpt2 is not rotary:
            found = _values(model_type, family, model, vocab_size, eod)
            losses[family.architecture] = lost = _lost(model, found)
            if not lost:
                return found
    closest = min(losses, key=lambda architecture: len(losses[architecture]))
    flags = model.__dataclass_fields__
    fields = ", ".join(f"{flag_of(flags[name])} {value}" for name, (value, _) in losses[closest].items())
    theirs = ", ".join(str(value) for _, value in losses[closest].values())
    raise ValueError(f"{fields} cannot be exported; transformers' {closest} has only {theirs}")


def _values(model_type: str, family: Family, model: ModelConfig, vocab_size: int, eod: int) -> dict[str, Any]:
    """The config.json of a family for what it has of a model."""
    fields = vars(model)
    found: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        **{key: fields[name] for key, name in family.keys.items()},
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "torch_dtype": "float32",
    }
    if family.like_gpt2:
        return found | family.values(fields)
    found["hidden_act"] = "silu"
    found |= window_keys(fields, model_type) | family.values(fields) | rope_keys(fields, model_type)
    if model_type == "llama":
        found["attention_bias"] = found["mlp_bias"] = not model.disable_bias_linear
    return found


def _lost(model: ModelConfig, values: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields in which a config.json is another model: the values of both, or none where it is none."""
    ours = _computed(model)
    try:
        described = ModelConfig(**describe_model(values).fields, seq_length=model.seq_length)
    except ValueError:
        return {name: (value, "other values") for name, value in ours.items()}
    theirs = _computed(described)
    return {name: (ours[name], theirs[name]) for name in ours if not _equal(ours[name], theirs[name])}


def _computed(model: ModelConfig) -> dict[str, Any]:
    """What decides what a model computes, by field; in one form where several fields mean the same."""
    found = {name: value for name, value in vars(model).items() if name not in _NOT_COMPUTED}
    found["softmax_scale"] = model.softmax_scale or model.kv_channels**-0.5
    found["add_qkv_bias"] = model.add_qkv_bias or not model.disable_bias_linear
    if model.rotary:
        found |= {"rotary_base": model.scaled_rotary_base, "mscale": model.rotary_attention_factor}
    window = next(filter(None, model.layer_windows), None)
    if window is not None and window >= model.max_position_embeddings and model.rotary_base_local is None:
        found |= {"window_size": None, "window_attn_skip_freq": None}  # it holds every text
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other
