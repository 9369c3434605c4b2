"""Families of transformers' models: what the keys of their config.json mean, and what they imply.

Keys and defaults are those of transformers' classes, `Olmo2Config` and so on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_zpp.config.positions import describe_rope_layers, rope_layers
from megatron_zpp.config.shapes.config_json import Values, positive, switch, unfit


@dataclass(frozen=True)
class Family:
    """One model_type.

    architecture   transformers' class
    keys           the field of ModelConfig that a key of config.json sets as it is
    defaults       values of keys that may be omitted
    only           values, the default first, of keys that would change the result in ways that no flag can
    fixed          fields of ModelConfig that the model_type implies
    fields         further ones, of the values of config.json
    values         further keys of config.json, of the fields of a ModelConfig
    other_names    of keys, that transformers takes as well
    """

    architecture: str
    keys: dict[str, str]
    defaults: dict[str, Any]
    only: dict[str, tuple[Any, ...]]
    fixed: dict[str, Any] = field(default_factory=dict)
    fields: Callable[[Values], dict[str, Any]] = lambda values: {}
    values: Callable[[Values], dict[str, Any]] = lambda model: {}
    other_names: dict[str, str] = field(default_factory=dict)

    @property
    def like_gpt2(self) -> bool:
        """Whether it has neither rope nor query groups nor windows."""
        return "position_embedding_type" in self.fixed


def _gpt2_values(model: Values) -> dict[str, Any]:
    inner = model["ffn_hidden_size"]
    return {
        "n_inner": None if inner == 4 * model["hidden_size"] else inner,
        "activation_function": "gelu_new",
        "embd_pdrop": model["hidden_dropout"],
    }


def _granite_fields(values: Values) -> dict[str, Any]:
    return {
        "embedding_multiplier": positive(values, "embedding_multiplier", 1.0),
        "residual_multiplier": positive(values, "residual_multiplier", 1.0),
        "softmax_scale": positive(values, "attention_multiplier", 1.0),
        "logits_multiplier": 1 / positive(values, "logits_scaling", 1.0),
    }


def _granite_values(model: Values) -> dict[str, Any]:
    return {
        "embedding_multiplier": model["embedding_multiplier"],
        "residual_multiplier": model["residual_multiplier"],
        "attention_multiplier": model["softmax_scale"] or model["kv_channels"] ** -0.5,
        "logits_scaling": 1 / model["logits_multiplier"],
    }


def _starcoder2_values(model: Values) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": not model["disable_bias_linear"],
        "embedding_dropout": model["hidden_dropout"],
    }


def _smollm3_fields(values: Values) -> dict[str, Any]:
    layers, every = values["num_hidden_layers"], int(positive(values, "no_rope_layer_interval", 4)) or 1
    rotated = values.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or any(each not in (0, 1) for each in rotated):
        raise unfit("no_rope_layers", rotated, f"a list with 0 or 1 for each of {layers} layers")
    return {"no_rope_freq": describe_rope_layers([bool(each) for each in rotated])}


def _smollm3_values(model: Values) -> dict[str, Any]:
    layers, pattern = model["num_layers"], model["no_rope_freq"]
    rotated = (True,) * layers if pattern is None else rope_layers(pattern, layers)
    return {"no_rope_layers": [int(each) for each in rotated], "use_sliding_window": False, **_NO_PADDING}


def _gemma_fields(values: Values, attention: float | None, logits: float | None) -> dict[str, Any]:
    """Those of Gemma 2 and 3, whose soft caps are `attention` and `logits` where config.json has none."""
    caps = {"attn_logit_softcapping": attention, "final_logit_softcapping": logits}
    caps = {key: values.get(key, usual) for key, usual in caps.items()}
    return {
        **{key: None if cap is None else positive(values, key, cap) for key, cap in caps.items()},
        "embedding_multiplier": math.sqrt(values["hidden_size"]),
        "softmax_scale": positive(values, "query_pre_attn_scalar", 256) ** -0.5,
    }


def _gemma_values(model: Values) -> dict[str, Any]:
    scale, activation = model["softmax_scale"] or model["kv_channels"] ** -0.5, "gelu_pytorch_tanh"
    return {
        "query_pre_attn_scalar": round(scale**-2),
        "hidden_act": activation,
        "hidden_activation": activation,
        "attn_logit_softcapping": model["attn_logit_softcapping"],
        "final_logit_softcapping": model["final_logit_softcapping"],
    }


_NO_PADDING = {"pad_token_id": None}  # transformers' default is no entry of a small vocabulary
_ANY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
    "is_causal": (True,),
}


def _keys(others: dict[str, Any], **fields: tuple[str, Any]) -> dict[str, Any]:
    """The `keys` and `defaults` of a Family: each field's key with its default, and those of `others`."""
    defaults = dict(fields.values())
    return {"keys": {key: name for name, (key, _) in fields.items()}, "defaults": defaults | others}


_GPT2 = Family(
    architecture="GPT2LMHeadModel",
    **_keys(
        num_layers=("n_layer", 12),
        hidden_size=("n_embd", 768),
        num_attention_heads=("n_head", 12),
        max_position_embeddings=("n_positions", 1024),
        ffn_hidden_size=("n_inner", None),
        norm_epsilon=("layer_norm_epsilon", 1e-5),
        init_method_std=("initializer_range", 0.02),
        attention_dropout=("attn_pdrop", 0.1),
        hidden_dropout=("resid_pdrop", 0.1),
        others={"vocab_size": 50257, "embd_pdrop": 0.1, "tie_word_embeddings": True},
    ),
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
        **_ANY,
    },
    fixed={"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"},
    values=_gpt2_values,
    other_names={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)
_BLOOM = Family(
    architecture="BloomForCausalLM",
    **_keys(
        num_layers=("n_layer", 2),
        hidden_size=("hidden_size", 64),
        num_attention_heads=("n_head", 8),
        max_position_embeddings=("seq_length", 2048),  # that of the training; ALiBi has no limit
        norm_epsilon=("layer_norm_epsilon", 1e-5),
        init_method_std=("initializer_range", 0.02),
        attention_dropout=("attention_dropout", 0.0),
        hidden_dropout=("hidden_dropout", 0.0),
        others={"vocab_size": 250880, "tie_word_embeddings": True},
    ),
    only={"apply_residual_connection_post_layernorm": (False,), "slow_but_exact": (False,), **_ANY},
    fixed={"position_embedding_type": "alibi", "normalization": "LayerNorm", "embed_layernorm": True},
    other_names={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
)
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
_LLAMA_FIXED: dict[str, Any] = {"normalization": "RMSNorm", "swiglu": True, "hidden_dropout": 0.0}
_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), **_ANY}
_NO_BIAS = {"disable_bias_linear": True}
_UNBIASED = {"attention_bias": (False,)}


def _like_llama(
    architecture: str,
    fixed: dict[str, Any],
    *,
    defaults: dict[str, Any] | None = None,
    only: dict[str, tuple[Any, ...]] | None = None,
    **others: Any,
) -> Family:
    """A family with Llama's keys, and its defaults and fixed fields but for those that are given."""
    given = _LLAMA_DEFAULTS | (defaults or {}), _SILU | (only or {})
    return Family(architecture, _LLAMA_KEYS, *given, _LLAMA_FIXED | fixed, **others)


def _olmo(architecture: str, **others: Any) -> Family:
    fixed = {"norm_placement": "after", "qk_layernorm": True, "qk_layernorm_across_heads": True}
    defaults = {"rms_norm_eps": 1e-5}
    return _like_llama(architecture, fixed | _NO_BIAS, defaults=defaults, only=_UNBIASED, **others)


def _glm(architecture: str, **fixed: Any) -> Family:
    return _like_llama(
        architecture,
        _NO_BIAS | {"rotary_interleaved": True} | fixed,
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
        fields=lambda values: {"add_qkv_bias": switch(values, "attention_bias", usual=True)},
        values=lambda model: {"attention_bias": model["add_qkv_bias"], **_NO_PADDING},
    )


def _gemma(
    architecture: str,
    caps: tuple[float | None, float | None],
    defaults: dict[str, Any],
    only: dict[str, tuple[Any, ...]],
    **fixed: Any,
) -> Family:
    """Gemma 2 or 3, whose soft caps of attention and logits are `caps` where config.json has none."""
    gates = {"swiglu": False, "geglu": True, "norm_placement": "both", "apply_layernorm_1p": True}
    return Family(
        architecture,
        _LLAMA_KEYS,
        _LLAMA_DEFAULTS | {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True} | defaults,
        _ANY
        | _UNBIASED
        | {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)}
        | only,
        _LLAMA_FIXED | _NO_BIAS | gates | fixed,
        lambda values: _gemma_fields(values, *caps),
        _gemma_values,
    )


FAMILIES: dict[str, Family] = {
    "gpt2": _GPT2,
    "bloom": _BLOOM,
    "llama": _like_llama("LlamaForCausalLM", {}),
    "mistral": _like_llama("MistralForCausalLM", _NO_BIAS, defaults={"num_key_value_heads": 8}),
    "qwen2": _like_llama(
        "Qwen2ForCausalLM", _NO_BIAS | {"add_qkv_bias": True}, defaults={"num_key_value_heads": 32}
    ),
    "qwen3": _like_llama(
        "Qwen3ForCausalLM",
        _NO_BIAS | {"qk_layernorm": True},
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        only=_UNBIASED,
    ),
    "olmo2": _olmo("Olmo2ForCausalLM"),
    "olmo3": _olmo("Olmo3ForCausalLM", values=lambda model: _NO_PADDING),
    "phi3": Family(
        "Phi3ForCausalLM",
        _LLAMA_KEYS | {"resid_pdrop": "hidden_dropout"},
        _LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        _SILU,
        _LLAMA_FIXED | _NO_BIAS,
        values=lambda model: {"embd_pdrop": model["hidden_dropout"], **_NO_PADDING},
    ),
    "glm": _glm("GlmForCausalLM"),
    "glm4": _glm("Glm4ForCausalLM", norm_placement="both"),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        {key: name for key, name in _LLAMA_KEYS.items() if key != "rms_norm_eps"}
        | {"norm_epsilon": "norm_epsilon", "residual_dropout": "hidden_dropout"},
        {key: value for key, value in _LLAMA_DEFAULTS.items() if key != "rms_norm_eps"}
        | {"norm_epsilon": 1e-5, "initializer_range": 0.018042, "num_key_value_heads": 2}
        | {"residual_dropout": 0.0, "embedding_dropout": 0.0, "tie_word_embeddings": True},
        {
            "hidden_act": ("gelu_pytorch_tanh",),
            "mlp_type": ("default",),
            "norm_type": ("layer_norm",),
            **_ANY,
        },
        {"normalization": "LayerNorm"},
        fields=lambda values: {"disable_bias_linear": not switch(values, "use_bias", usual=True)},
        values=_starcoder2_values,
    ),
    "granite": _like_llama(
        "GraniteForCausalLM",
        _NO_BIAS,
        only=_UNBIASED | {"mlp_bias": (False,)},
        fields=_granite_fields,
        values=_granite_values,
    ),
    "smollm3": _like_llama(
        "SmolLM3ForCausalLM",
        _NO_BIAS,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
        only=_UNBIASED | {"mlp_bias": (False,), "use_sliding_window": (False,)},
        fields=_smollm3_fields,
        values=_smollm3_values,
    ),
    "gemma2": _gemma("Gemma2ForCausalLM", (50.0, 30.0), {}, {}),
    "gemma3_text": _gemma(
        "Gemma3ForCausalLM",
        (None, None),
        {"num_attention_heads": 8, "max_position_embeddings": 131072, "vocab_size": 262208},
        {"attn_logit_softcapping": (None,)},  # transformers does not compute it
        qk_layernorm=True,
    ),
}
