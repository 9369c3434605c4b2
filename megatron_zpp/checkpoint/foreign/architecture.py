"""The model that Megatron-LM's settings describe, as ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.foreign.pickled import Global, Record
from megatron_zpp.config.model import ModelConfig

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
# Settings of a model that ours cannot be, with the values that are ours.
_SWITCHES = (
    *("multi_latent_attention", "apply_layernorm_1p", "apply_residual_connection_post_layernorm"),
    *("quick_geglu", "is_hybrid_model", "attention_output_gate", "qk_l2_norm", "enable_mhc_connections"),
)
_VALUES = (
    *("glu_activation", "hybrid_override_pattern", "no_rope_freq", "experimental_attention_variant"),
    *("activation_func_clamp_value", "hybrid_layer_pattern", "heterogeneous_layers_config_path"),
)
_ONLY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SWITCHES, (None, False)),
    **dict.fromkeys(_VALUES, (None,)),
    **dict.fromkeys(("mtp_num_layers", "glu_linear_offset"), (None, 0)),
    "num_experts": (None, 0, 1, [1], (1,)),
    "rope_type": (None, "rope"),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "spec": (None, [], ()),
}
_COPIED = (
    *("kv_channels", "ffn_hidden_size", "max_position_embeddings", "qk_layernorm", "swiglu"),
    *("squared_relu", "add_qkv_bias", "untie_embeddings_and_output_weights", "embed_layernorm"),
    *("softmax_type", "softmax_scale", "fp32_residual_connection"),
)
_DROPOUTS = ("attention_dropout", "hidden_dropout")
_OF_ROPE = ("rotary_percent", "rotary_seq_len_interpolation_factor")
_OF_YARN = (  # which rotates all channels whatever --rotary-percent says
    *("rotary_scaling_factor", "yarn_beta_fast", "yarn_beta_slow", "mscale", "mscale_all_dim"),
)
_BASES = ("rotary_base", "rope_theta")  # the second of Megatron-DeepSpeed
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


def read_settings(path: Path, args: Mapping[str, Any], divisible_by: int) -> tuple[ModelConfig, list[str]]:
    """Return the model that `args` describe, and notes for the person who imports it.

    Raises ValueError, in one line, for a model that ours cannot be.
    """
    if missing := [name for name in _NEEDED if type(args.get(name)) is not int]:
        problem = f"its args do not say {missing[0]}, so the shape of its model is unknown"
        raise ValueError(f"{path}: {problem}; save it again with the program's args in it")
    for name, allowed in _ONLY.items():
        value = args.get(name)
        if value not in allowed:
            raise ValueError(f"{path}: its model has {name} {value!s:.40}, which this program does not have")
    fields = {name: args[name] for name in (*_NEEDED, *_COPIED) if args.get(name) is not None}
    longest = args.get("max_position_embeddings") or args.get("seq_length")
    fields |= {name: _number(path, name, args[name]) for name in _DROPOUTS if args.get(name) is not None}
    fields |= {"max_position_embeddings": longest, "seq_length": longest}
    fields["make_vocab_size_divisible_by"] = divisible_by
    fields |= _norm(path, args) | _positions(path, args) | _groups(args) | _window(args) | _mup(args)
    fields["disable_bias_linear"] = not args.get("add_bias_linear", True)
    try:
        model = ModelConfig(**fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: its args describe no model of ours: {error}") from None
    return model, _notes(args, model)


def _norm(path: Path, args: Mapping[str, Any]) -> dict[str, Any]:
    name = args.get("normalization", "LayerNorm")
    if str(name).lower() not in _NORMS:
        raise ValueError(f"{path}: its model has normalization {name!s:.40}; must be LayerNorm or RMSNorm")
    epsilon = args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5))
    return {
        "normalization": _NORMS[str(name).lower()],
        "norm_epsilon": _number(path, "norm_epsilon", epsilon),
    }


def _positions(path: Path, args: Mapping[str, Any]) -> dict[str, Any]:
    kind = args.get("position_embedding_type", "learned_absolute")
    if isinstance(kind, Record):  # an enum of Megatron-DeepSpeed's
        member = kind.arguments[-1] if kind.arguments else 0
        kind = {1: "rope", 2: "learned_absolute", 3: "alibi"}.get(member, member)
    if isinstance(kind, Global):
        kind = kind.name
    kind = {"rotary": "rope", "absolute": "learned_absolute"}.get(kind, kind)
    if args.get("use_rotary_position_embeddings"):
        kind = "rope"
    if kind not in ("learned_absolute", "rope", "yarn", "alibi", "none"):
        fix = "must be learned_absolute, rope, yarn, alibi or none"
        raise ValueError(f"{path}: its model has position_embedding_type {kind!s:.40}; {fix}")
    found = {"position_embedding_type": kind}
    if kind in ("rope", "yarn"):
        if bases := _rotary_bases(path, args):
            found |= {"rotary_base": bases.pop()}
        names = _OF_ROPE if kind == "rope" else _OF_YARN
        keys = ((name, key) for name in names for key in (name, f"yarn_{name}"))  # core 0.16's win
        found |= {name: _number(path, name, args[key]) for name, key in keys if args.get(key) is not None}
        found["rotary_interleaved"] = bool(args.get("rotary_interleaved"))
    if kind == "yarn":
        names = ("yarn_original_max_position_embeddings", "yarn_correction_range_round_to_int")
        found |= {name: args[name] for name in names if args.get(name) is not None}
    if kind == "rope" and args.get("use_rope_scaling"):
        factor = _number(path, "rope_scaling_factor", args.get("rope_scaling_factor", 8.0))
        found |= {"use_rope_scaling": True, "rope_scaling_factor": factor}
    return found


def _rotary_bases(path: Path, args: Mapping[str, Any]) -> set[float]:
    """The base of rope's wavelengths; empty if `args` do not say it. Raises ValueError if they say two."""
    said = {name: _number(path, name, args[name]) for name in _BASES if args.get(name) is not None}
    if len(bases := set(said.values())) > 1:
        both = " and ".join(f"{name} {base:g}" for name, base in said.items())
        raise ValueError(f"{path}: its args say {both}, two names of one setting; remove the wrong one")
    return bases


def _number(path: Path, name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{path}: its args say {name} {value!s:.40}, which is no number")
    return float(value)


def _groups(args: Mapping[str, Any]) -> dict[str, Any]:
    heads = args["num_attention_heads"]
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    groups = groups or args.get("num_key_value_heads") or heads  # the second of Megatron-DeepSpeed
    return {"group_query_attention": True, "num_query_groups": groups} if groups != heads else {}


def _window(args: Mapping[str, Any]) -> dict[str, Any]:
    window = args.get("window_size")
    if window is None:
        return {}
    found = {"window_size": ",".join(map(str, window)) if isinstance(window, tuple | list) else str(window)}
    if (pattern := args.get("window_attn_skip_freq")) is not None:
        found["window_attn_skip_freq"] = str(pattern)
    return found


def _mup(args: Mapping[str, Any]) -> dict[str, Any]:
    if not args.get("use_mup"):
        return {}
    names = {
        **{name: name for name in ("mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power")},
        "mup_embedding_mult": "embedding_multiplier",
        "mup_output_mult": "logits_multiplier",
    }
    found = {ours: args[theirs] for theirs, ours in names.items() if args.get(theirs) is not None}
    return {"use_mup": True, **found}


def _notes(args: Mapping[str, Any], model: ModelConfig) -> list[str]:
    exact = args.get("bias_gelu_fusion") is False and not args.get("openai_gelu")
    if model.activation == "gelu" and exact:
        return [
            "its run computed GELU by the error function (--no-bias-gelu-fusion); this program computes "
            "its tanh approximation, up to 5e-4 away"
        ]
    return []
