"""Hugging Face's config.json and ModelConfig's fields: what means the same is mapped, the rest is refused.

Keys, their defaults and their meaning are those of transformers' GPT2Config, LlamaConfig, MistralConfig,
Qwen2Config and Qwen3Config, in the spelling of versions 4 (rope_theta, rope_scaling) and 5 (rope_parameters).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_zpp.config.shapes.huggingface_window import window_fields, window_keys
from megatron_zpp.config.values.json_file import shown

CONFIG = "config.json"
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Family:
    """One model_type.

    architecture   transformers' class
    keys           the field of ModelConfig that a key of config.json sets as it is
    defaults       values of keys that may be omitted
    only           values, the default first, of keys that would change the result in ways that no flag can
    fixed          fields of ModelConfig that the model_type implies
    """

    architecture: str
    keys: dict[str, str]
    defaults: dict[str, Any]
    only: dict[str, tuple[Any, ...]]
    fixed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DescribedModel:
    """A model as its config.json describes it; `notes` are lines for the person who reads it."""

    model_type: str
    fields: dict[str, Any]  # of ModelConfig, without seq_length
    vocab_size: int
    notes: tuple[str, ...] = ()


_ANY: dict[str, tuple[Any, ...]] = {"quantization_config": (None,), "pruned_heads": (None, {})}
_GPT2 = Family(
    architecture="GPT2LMHeadModel",
    keys={
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "ffn_hidden_size",
        "layer_norm_epsilon": "norm_epsilon",
        "initializer_range": "init_method_std",
        "attn_pdrop": "attention_dropout",
        "resid_pdrop": "hidden_dropout",
    },
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
        **_ANY,
    },
    fixed={"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"},
)
_GPT2_NAMES = {  # that transformers takes as well
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_LLAMA_KEYS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_method_std",
    "attention_dropout": "attention_dropout",
}
_LLAMA_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
_LLAMA_FIXED: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "hidden_dropout": 0.0,
}
_SILU: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1.0, 1),
    **_ANY,
}
_NO_BIAS = {"disable_bias_linear": True}

FAMILIES: dict[str, Family] = {
    "gpt2": _GPT2,
    "llama": Family("LlamaForCausalLM", _LLAMA_KEYS, _LLAMA_DEFAULTS, _SILU, _LLAMA_FIXED),
    "mistral": Family(
        "MistralForCausalLM",
        _LLAMA_KEYS,
        _LLAMA_DEFAULTS | {"num_key_value_heads": 8},
        _SILU,
        _LLAMA_FIXED | _NO_BIAS,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _LLAMA_KEYS,
        _LLAMA_DEFAULTS | {"num_key_value_heads": 32},
        _SILU,
        _LLAMA_FIXED | _NO_BIAS | {"add_qkv_bias": True},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA_KEYS,
        _LLAMA_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
        _SILU | {"attention_bias": (False,)},
        _LLAMA_FIXED | _NO_BIAS | {"qk_layernorm": True},
    ),
}
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_OPTIONAL = ("n_inner", "num_key_value_heads", "head_dim")
_NUMBERS = (
    *("layer_norm_epsilon", "initializer_range", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
    *("rms_norm_eps", "attention_dropout"),
)


def describe_model(values: dict[str, Any]) -> DescribedModel:
    """Return what a config.json says. Raises ValueError, naming the key, for what no flag can express."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{CONFIG}: model_type is {shown(model_type)}; must be one of {known}")
    family = FAMILIES[model_type]
    for key, supported in family.only.items():
        value = values.get(key, supported[0])
        if not any(value == one and type(value) is type(one) for one in supported):
            raise ValueError(
                f"{CONFIG}: {key} {shown(value)} is not supported; must be {shown(supported[0])}"
            )
    if model_type == "gpt2":
        values = values | {name: values[other] for other, name in _GPT2_NAMES.items() if other in values}
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
    if model_type == "gpt2":
        return DescribedModel(model_type, fields, their["vocab_size"], _dropout_notes(their))
    groups = fields["num_query_groups"]
    fields["group_query_attention"] = groups is not None and groups != fields["num_attention_heads"]
    if model_type == "llama":
        fields["disable_bias_linear"] = _without_biases(values)
    fields |= _rope_fields(values)
    fields |= window_fields(values, fields["num_layers"], fields["max_position_embeddings"])
    return DescribedModel(model_type, fields, their["vocab_size"])


def model_type_of(model: Mapping[str, Any]) -> str:
    """Return the model_type whose transformers class computes a model with these fields of ModelConfig.

    Raises ValueError that names the first field that no class of FAMILIES has.
    """
    if model["position_embedding_type"] == "learned_absolute":
        wanted = _GPT2.fixed | {
            "swiglu": False,
            "squared_relu": False,
            "qk_layernorm": False,
            "disable_bias_linear": False,
            "num_query_groups": model["num_attention_heads"],
            "window_size": None,
        }
        _check_fields("GPT-2", model, wanted)
        if model["kv_channels"] * model["num_attention_heads"] != model["hidden_size"]:
            raise ValueError(
                f"its heads are {model['kv_channels']} wide (--kv-channels); transformers' GPT-2 has only "
                f"--hidden-size {model['hidden_size']} / --num-attention-heads {model['num_attention_heads']}"
            )
        return "gpt2"
    computed = {name: value for name, value in _LLAMA_FIXED.items() if name != "hidden_dropout"}
    _check_fields("Llama, Qwen2 and Qwen3", model, computed | {"rotary_percent": 1.0})
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
    if model_type == "gpt2":
        if found["n_inner"] == 4 * found["n_embd"]:
            found["n_inner"] = None
        return found | {"activation_function": "gelu_new", "embd_pdrop": model["hidden_dropout"]}
    found["hidden_act"] = "silu"
    found |= window_keys(model, model_type)
    if model_type == "llama":
        found["attention_bias"] = found["mlp_bias"] = not model["disable_bias_linear"]
    found["rope_theta"], found["rope_scaling"] = model["rotary_base"], None
    if model["use_rope_scaling"]:
        factor = {"factor": model["rope_scaling_factor"]}
        found["rope_scaling"] = {"rope_type": "llama3", **factor, **_LLAMA3_ROPE}
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


def _rope_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of rope, from either spelling."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{CONFIG}: rope_parameters is {shown(rope)}; must be an object")
    base = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        shares = shown(rope["partial_rotary_factor"])
        raise ValueError(f"{CONFIG}: partial_rotary_factor {shares} is not supported; must be 1.0")
    if kind not in ("default", "llama3"):
        raise ValueError(f"{CONFIG}: rope_type {shown(kind)} is not supported; must be default or llama3")
    found = {"rope_theta": base} | ({"factor": rope.get("factor")} if kind == "llama3" else {})
    for key, value in found.items():
        if type(value) not in (int, float):
            raise ValueError(f"{CONFIG}: {key} of rope is {shown(value)}; must be a number")
    if kind == "default":
        return {"rotary_base": float(base)}
    for key, value in _LLAMA3_ROPE.items():
        if rope.get(key) != value:
            raise ValueError(f"{CONFIG}: {key} {shown(rope.get(key))} is not supported; must be {value}")
    return {"rotary_base": float(base), "use_rope_scaling": True, "rope_scaling_factor": found["factor"]}


def _dropout_notes(their: dict[str, Any]) -> tuple[str, ...]:
    if their["embd_pdrop"] == their["resid_pdrop"]:
        return ()
    found = f"embd_pdrop {their['embd_pdrop']} is not resid_pdrop {their['resid_pdrop']}"
    return (f"{found}; --hidden-dropout is both",)


def _check_fields(families: str, model: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if model[name] != value:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} {model[name]} cannot be exported; transformers' {families} has only {value}"
            )
