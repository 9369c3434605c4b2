"""ModelConfig's fields from Hugging Face's config.json: what means the same is mapped, the rest is refused.

Keys, their defaults and their meaning are those of transformers' GPT2Config, LlamaConfig, MistralConfig,
Qwen2Config and Qwen3Config, in the spelling of versions 4 (rope_theta, rope_scaling) and 5 (rope_parameters).
"""

from dataclasses import dataclass, replace
from typing import Any

from megatron_zpp.config.shapes.config_json import CONFIG, Values, switch, unfit, unsupported
from megatron_zpp.config.shapes.huggingface_families import FAMILIES, Family
from megatron_zpp.config.shapes.huggingface_rope import rope_fields
from megatron_zpp.config.shapes.huggingface_window import window_fields
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
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in _TEXT_OF:
        values = _text_values(values)
        text = describe_model(values)
        return replace(text, notes=(*text.notes, "its text alone; the model of images is omitted"))
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
    if found["model_type"] in tuple(_TEXT_OF):
        raise unfit("model_type of text_config", found["model_type"], "a text's")
    key = {"mistral": "layer_types", "gemma3_text": "final_logit_softcapping"}.get(str(found["model_type"]))
    if key and found.get(key) is not None:
        raise unsupported(f"{key} of text_config", found[key], "omitted")  # not obeyed there
    tied = "tie_word_embeddings"
    return {tied: values[tied]} | found if tied in values else found


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
