"""Hugging Face's config.json and ModelConfig's fields: what means the same is mapped, the rest is refused.

Keys, their defaults and their meaning are those of transformers' GPT2Config, LlamaConfig, MistralConfig,
Qwen2Config and Qwen3Config, in the spelling of versions 4 (rope_theta, rope_scaling) and 5 (rope_parameters).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_zpp.config.shapes.huggingface_families import FAMILIES, LLAMA_FIXED
from megatron_zpp.config.shapes.huggingface_rope import rope_fields, rope_keys, rope_limits
from megatron_zpp.config.shapes.huggingface_window import window_fields, window_keys
from megatron_zpp.config.values.json_file import shown

CONFIG = "config.json"
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class DescribedModel:
    """A model as its config.json describes it; `notes` are lines for the person who reads it."""

    model_type: str
    fields: dict[str, Any]  # of ModelConfig, without seq_length
    vocab_size: int
    notes: tuple[str, ...] = ()


_OPTIONAL = ("n_inner", "num_key_value_heads", "head_dim")
_NUMBERS = (
    *("layer_norm_epsilon", "initializer_range", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
    *("rms_norm_eps", "norm_epsilon", "attention_dropout", "hidden_dropout", "residual_dropout"),
    "embedding_dropout",
)


_UNUSUAL: dict[str, Any] = {  # fields that few families have, and what the others compute with
    "norm_placement": "before",
    "apply_layernorm_1p": False,
    "embed_layernorm": False,
    "geglu": False,
    "squared_relu": False,
    "qk_layernorm_across_heads": False,
    "softmax_scale": None,
    "attn_logit_softcapping": None,
    "softmax_type": "vanilla",
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_multiplier": 1.0,
    "final_logit_softcapping": None,
    "rotary_base_local": None,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "no_rope_freq": None,
}
_TEXT_OF = {"gemma3": "gemma3_text", "mistral3": "mistral"}  # models of text and images
_TITLES = {
    "starcoder2": "StarCoder2",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "phi3": "Phi-3",
    "glm": "GLM",
    "glm4": "GLM-4",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "smollm3": "SmolLM3",
    "granite": "Granite",
}
_SCALES = "softmax_scale", "embedding_multiplier", "residual_multiplier", "logits_multiplier"
_CAPS = "attn_logit_softcapping", "final_logit_softcapping"
_FREE = {  # of _UNUSUAL, what a family has in config.json
    "gemma2": ("softmax_scale", "embedding_multiplier", *_CAPS),
    "gemma3_text": ("softmax_scale", "embedding_multiplier", *_CAPS, "rotary_base_local"),
    "olmo3": ("rotary_base_local",),
    "phi3": ("rotary_percent",),
    "glm": ("rotary_percent",),
    "glm4": ("rotary_percent",),
    "smollm3": ("no_rope_freq",),
    "granite": _SCALES,
}


def _unusual_type(model: Mapping[str, Any]) -> str | None:
    """The family that alone has a field of the model; None for those like Llama."""
    if model["normalization"] == "LayerNorm" and not model["swiglu"]:
        return "starcoder2"
    if model["rotary_interleaved"]:
        return "glm4" if model["norm_placement"] == "both" else "glm"
    if model["position_embedding_type"] == "longrope" or model["rotary_percent"] not in (1, None):
        return "phi3"
    if model["norm_placement"] == "both":
        return "gemma3_text" if model["qk_layernorm"] else "gemma2"
    if model["norm_placement"] == "after":
        return "olmo2" if model["window_size"] is None else "olmo3"
    if model["no_rope_freq"] is not None:
        return "smollm3"
    return "granite" if any(model[name] != _UNUSUAL[name] for name in _SCALES) else None


def describe_model(values: dict[str, Any]) -> DescribedModel:
    """Return what a config.json says. Raises ValueError, naming the key, for what no flag can express."""
    if values.get("model_type") in _TEXT_OF:
        values = _text_values(values)
        text = describe_model(values)
        return replace(text, notes=(*text.notes, "its text alone; the model of images is omitted"))
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        from megatron_zpp.config.shapes.unsupported import unsupported_features

        if features := unsupported_features(values):
            raise ValueError(f"{CONFIG}: model_type {shown(model_type)}: not supported: {features}")
        known = ", ".join(FAMILIES)
        raise ValueError(f"{CONFIG}: model_type is {shown(model_type)}; must be one of {known}")
    family = FAMILIES[model_type]
    for key, supported in family.only.items():
        value = values.get(key, supported[0])
        if not any(value == one and type(value) is type(one) for one in supported):
            raise ValueError(
                f"{CONFIG}: {key} {shown(value)} is not supported; must be {shown(supported[0])}"
            )
    values = values | {name: values[other] for other, name in family.other_names.items() if other in values}
    needed = (*family.keys, "vocab_size", "tie_word_embeddings")
    for key in needed:
        if key not in values and key not in family.defaults:
            raise ValueError(f"{CONFIG}: has no {key}")
    their: dict[str, Any] = {
        key: values.get(key, family.defaults.get(key)) for key in (*needed, *family.defaults)
    }
    _check_types(their)
    fields: dict[str, Any] = {name: their[key] for key, name in family.keys.items()} | family.fixed
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


def _text_values(values: dict[str, Any]) -> dict[str, Any]:
    """What the config.json of a model of text and images says about its text."""
    text = values.get("text_config", {})
    if not isinstance(text, dict):
        raise ValueError(f"{CONFIG}: text_config is {shown(text)}; must be an object")
    found = {"model_type": _TEXT_OF[values["model_type"]]} | text
    if found["model_type"] in _TEXT_OF:
        raise ValueError(
            f"{CONFIG}: text_config has model_type {shown(found['model_type'])}; must be a text's"
        )
    tied = "tie_word_embeddings"
    return {tied: values[tied]} | found if tied in values else found


def model_type_of(model: Mapping[str, Any]) -> str:
    """Return the model_type whose transformers class computes a model with these fields of ModelConfig.

    Raises ValueError that names the first field that no class of FAMILIES has.
    """
    for like_gpt2, title in (("gpt2", "GPT-2"), ("bloom", "BLOOM")):
        if model["position_embedding_type"] == FAMILIES[like_gpt2].fixed["position_embedding_type"]:
            _check_like_gpt2(like_gpt2, title, model)
            return like_gpt2
    computed = {name: value for name, value in LLAMA_FIXED.items() if name != "hidden_dropout"}
    if (unusual := _unusual_type(model)) is not None:
        fixed = {name: value for name, value in FAMILIES[unusual].fixed.items() if name != "hidden_dropout"}
        free = _FREE.get(unusual, ())
        wanted = {name: value for name, value in _UNUSUAL.items() if name not in free}
        wanted |= {"add_qkv_bias": False} | rope_limits(model, unusual)
        if unusual in ("gemma2", "gemma3_text"):  # whose config.json has multiplier and scale as integers
            scalar = round((model["softmax_scale"] or model["kv_channels"] ** -0.5) ** -2)
            wanted |= {"embedding_multiplier": math.sqrt(model["hidden_size"])}
            if model["softmax_scale"] is not None:
                wanted["softmax_scale"] = float(scalar) ** -0.5
        elif unusual == "starcoder2":
            wanted |= {"qk_layernorm": False, "swiglu": False, "window_attn_skip_freq": None}
        elif unusual == "phi3":  # whose config.json has no width of heads
            width = model["hidden_size"] // model["num_attention_heads"]
            wanted |= {"qk_layernorm": False, "window_attn_skip_freq": None, "kv_channels": width}
        elif unusual in ("glm", "glm4"):
            wanted |= {"qk_layernorm": False, "window_size": None, "add_qkv_bias": model["add_qkv_bias"]}
        elif unusual != "olmo3":
            wanted |= {"qk_layernorm": False, "window_size": None}
        _check_fields(_TITLES[unusual], model, wanted | fixed)
        return unusual
    _check_fields("Llama, Qwen2 and Qwen3", model, rope_limits(model, "llama") | computed | _UNUSUAL)
    biases = not model["disable_bias_linear"], model["add_qkv_bias"]
    if model["qk_layernorm"]:
        _check_fields("Qwen3", model, {"disable_bias_linear": True, "add_qkv_bias": False})
        return "qwen3"
    if biases == (False, True):
        return "qwen2"
    if model["window_size"] is None:
        return "llama"
    _check_fields("Mistral", model, {"disable_bias_linear": True, "window_attn_skip_freq": None})
    return "mistral"


def _check_like_gpt2(model_type: str, title: str, model: Mapping[str, Any]) -> None:
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    wanted = _UNUSUAL | {
        "swiglu": False,
        "qk_layernorm": False,
        "disable_bias_linear": False,
        "num_query_groups": heads,
        "window_size": None,
        "rotary_percent": None,
    }
    if model_type == "bloom":
        wanted["ffn_hidden_size"] = 4 * hidden
    _check_fields(title, model, wanted | FAMILIES[model_type].fixed)
    if model["kv_channels"] * heads != hidden:
        raise ValueError(
            f"its heads are {model['kv_channels']} wide (--kv-channels); transformers' {title} has only "
            f"--hidden-size {hidden} / --num-attention-heads {heads}"
        )


def huggingface_values(model: Mapping[str, Any], vocab_size: int, eod: int) -> dict[str, Any]:
    """Return the contents of config.json for the fields of a ModelConfig. Raises as `model_type_of`."""
    model_type = model_type_of(model)
    family = FAMILIES[model_type]
    found: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        **{key: model[name] for key, name in family.keys.items()},
        "tie_word_embeddings": not model["untie_embeddings_and_output_weights"],
        "bos_token_id": eod,
        "eos_token_id": eod,
        "torch_dtype": "float32",
    }
    if family.like_gpt2:
        return found | family.values(model)
    found["hidden_act"] = "silu"
    found |= window_keys(model, model_type) | family.values(model) | rope_keys(model, model_type)
    if model_type == "llama":
        found["attention_bias"] = found["mlp_bias"] = not model["disable_bias_linear"]
    return found


def _check_types(their: dict[str, Any]) -> None:
    for key, value in their.items():
        if key == "tie_word_embeddings":
            if type(value) is not bool:
                raise ValueError(f"{CONFIG}: {key} is {shown(value)}; must be true or false")
        elif key in _NUMBERS:
            if type(value) not in (int, float):
                raise ValueError(f"{CONFIG}: {key} is {shown(value)}; must be a number")
        elif not (type(value) is int and 0 < value <= _LARGEST) and not (key in _OPTIONAL and value is None):
            raise ValueError(f"{CONFIG}: {key} is {shown(value)}; must be a positive integer")


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


def _check_fields(families: str, model: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if model[name] != value:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} {model[name]} cannot be exported; transformers' {families} has only {value}"
            )
