"""Hugging Face's config.json and ModelConfig's fields: what means the same is mapped, the rest is refused.

Keys, their defaults and their meaning are those of transformers' GPT2Config, LlamaConfig, MistralConfig,
Qwen2Config and Qwen3Config, in the spelling of versions 4 (rope_theta, rope_scaling) and 5 (rope_parameters).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from megatron_zpp.config.model import NOT_SHAPE, ModelConfig
from megatron_zpp.config.options import flag_of
from megatron_zpp.config.positions import ROTARY
from megatron_zpp.config.shapes.config_json import CONFIG, Values, switch, unfit, unsupported
from megatron_zpp.config.shapes.huggingface_families import FAMILIES, Family
from megatron_zpp.config.shapes.huggingface_rope import rope_fields, rope_keys
from megatron_zpp.config.shapes.huggingface_window import window_fields, window_keys
from megatron_zpp.config.values.json_file import shown

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class DescribedModel:
    """A model as its config.json describes it; `notes` are lines for the person who reads it."""

    model_type: str
    fields: dict[str, Any]  # of ModelConfig, without seq_length
    vocab_size: int
    notes: tuple[str, ...] = ()


_OPTIONAL = ("n_inner", "num_key_value_heads", "head_dim")
_TEXT_OF = {"gemma3": "gemma3_text", "mistral3": "mistral"}  # models of text and images
_NOT_COMPUTED = (  # fields without which two models compute the same, or that others say
    *(*NOT_SHAPE, "model_preset", "group_query_attention", "rotary_ntk_factor", "mscale_all_dim"),
    *("use_mup", "mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power"),
)

_UNSUPPORTED = {  # features that are not here, and their keys, of which the first stands for the feature
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


def describe_model(values: dict[str, Any]) -> DescribedModel:
    """Return what a config.json says. Raises ValueError, naming the key, for what no flag can express."""
    if values.get("model_type") in _TEXT_OF:
        values = _text_values(values)
        text = describe_model(values)
        return replace(text, notes=(*text.notes, "its text alone; the model of images is omitted"))
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        if features := _unsupported_features(values):
            raise ValueError(f"{CONFIG}: model_type {shown(model_type)}: not supported: {features}")
        raise unfit("model_type", model_type, f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    for key, supported in family.only.items():
        value = values.get(key, supported[0])
        if not any(value == one and type(value) is type(one) for one in supported):
            raise unsupported(key, value, shown(supported[0]))
    values = values | {name: values[other] for other, name in family.other_names.items() if other in values}
    needed = (*family.keys, "vocab_size", "tie_word_embeddings")
    for key in needed:
        if key not in values and key not in family.defaults:
            raise ValueError(f"{CONFIG}: has no {key}")
    their: dict[str, Any] = {
        key: values.get(key, family.defaults.get(key)) for key in (*needed, *family.defaults)
    }
    _check_types(their, family)
    fields: dict[str, Any] = family.fixed | {name: their[key] for key, name in family.keys.items()}
    fields |= {name: float(fields[name]) for name in ("norm_epsilon", "init_method_std", "attention_dropout")}
    fields["hidden_dropout"] = float(fields["hidden_dropout"])
    fields["untie_embeddings_and_output_weights"] = not their["tie_word_embeddings"]
    if family.like_gpt2:
        return DescribedModel(model_type, fields, their["vocab_size"], _dropout_notes(their))
    groups = fields["num_query_groups"]
    fields["group_query_attention"] = groups is not None and groups != fields["num_attention_heads"]
    if model_type == "llama":
        fields["disable_bias_linear"] = _without_biases(values)
    rope, notes = rope_fields(values, fields["max_position_embeddings"])
    fields |= rope
    fields |= window_fields(values, fields["num_layers"], fields["max_position_embeddings"])
    fields |= family.fields(values)
    if fields.get("window_size") is None:
        fields.pop("rotary_base_local", None)  # no layer has it
    return DescribedModel(model_type, fields, their["vocab_size"], _dropout_notes(their) + notes)


def _unsupported_features(values: Values) -> str:
    """Return the features of a config.json that are not here, each with its key; empty if none is known.

    A model of text and images has its text's keys in `text_config`.
    """
    nested = [values[key] for key in ("text_config", "ffn_config") if isinstance(values.get(key), dict)]
    keys = {key: value for each in (*nested, values) for key, value in each.items()}
    found = []
    for feature, names in _UNSUPPORTED.items():
        there = next((name for name in names if _has(keys.get(name))), None)
        if there is not None:
            value = "" if isinstance(keys[there], dict) else f" {shown(keys[there])}"
            found.append(f"{feature} ({there}{value})")
    return ", ".join(found)


def _has(value: Any) -> bool:
    """Whether a key says that the feature is there: 0 or 1 of something is none of it."""
    return value is True or value not in (None, False, 0, 1)


def _text_values(values: dict[str, Any]) -> dict[str, Any]:
    """What the config.json of a model of text and images says about its text."""
    text = values.get("text_config", {})
    if not isinstance(text, dict):
        raise unfit("text_config", text, "an object")
    found = {"model_type": _TEXT_OF[values["model_type"]]} | text
    if found["model_type"] in _TEXT_OF:
        raise unfit("model_type of text_config", found["model_type"], "a text's")
    tied = "tie_word_embeddings"
    return {tied: values[tied]} | found if tied in values else found


def huggingface_values(model: ModelConfig, vocab_size: int, eod: int) -> dict[str, Any]:
    """Return a config.json that describes the model, for the first family of FAMILIES that can.

    Raises ValueError, with the fields that the family loses which loses the fewest, if none can.
    """
    rotary = model.position_embedding_type in ROTARY
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


def _check_types(their: dict[str, Any], family: Family) -> None:
    """Raise ValueError unless values are of their defaults' types; a key without one is a whole number."""
    for key, value in their.items():
        usual = family.defaults.get(key)
        if isinstance(usual, bool):
            switch(their, key, usual)
        elif isinstance(usual, float):
            if type(value) not in (int, float):
                raise unfit(key, value, "a number")
        elif not (type(value) is int and 0 < value <= _LARGEST) and not (key in _OPTIONAL and value is None):
            raise unfit(key, value, "a positive integer")


def _without_biases(values: dict[str, Any]) -> bool:
    """Whether a Llama has no biases. Raises ValueError unless attention and MLP agree."""
    biases = [values.get(key, False) for key in ("attention_bias", "mlp_bias")]
    if biases not in ([False, False], [True, True]):
        raise ValueError(
            f"{CONFIG}: attention_bias {shown(biases[0])} with mlp_bias {shown(biases[1])} is not supported; "
            "both must be false or both true"
        )
    return not biases[0]


def _dropout_notes(their: dict[str, Any]) -> tuple[str, ...]:
    for one, other in (("embd_pdrop", "resid_pdrop"), ("embedding_dropout", "residual_dropout")):
        if their.get(one) != their.get(other):
            return (f"{one} {their[one]} is not {other} {their[other]}; --hidden-dropout is both",)
    return ()
