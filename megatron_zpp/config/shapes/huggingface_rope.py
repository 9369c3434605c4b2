"""Rotary positions in config.json and in ModelConfig's fields, in the spelling of transformers 4 and 5.

Version 4 has rope_theta, rope_scaling and partial_rotary_factor, version 5 has all in rope_parameters.
Families with another rope in layers with a window have these twice, as full_attention and sliding_attention.
"""

import math
from typing import Any

from megatron_zpp.config.positions import ntk_base
from megatron_zpp.config.shapes.config_json import Values, mapping, positive, switch, unfit, unsupported
from megatron_zpp.config.words import either

_BASES = {"smollm3": 2_000_000.0, "gemma3_text": 1_000_000.0, "olmo3": 500_000.0}  # without rope_theta
_BY_LAYER = ("gemma3_text", "olmo3")
_LAYERS = ("full_attention", "sliding_attention")
_SHARES = {"phi3": 1.0, "glm": 0.5, "glm4": 0.5}  # families with partial_rotary_factor, and its default
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_OLD_NAMES = {"su": "longrope", "yarn": "longrope"}  # of Phi-3


def rope_fields(values: Values, positions: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of ModelConfig, and notes for the person who reads them.

    `positions` are max_position_embeddings. Raises ValueError that names the key.
    """
    model_type = values["model_type"]
    rope, local = _by_layer(values)
    usual = _number(values, "rope_theta", _BASES.get(model_type, 10_000.0))
    base = _number(rope, "rope_theta", usual)
    if values.get("rope_theta") is not None and base != usual:  # transformers 4 takes one, 5 the other
        raise unsupported("rope_theta", usual, f"{base}, as in rope")
    kind = _kind(rope, model_type)
    fields = {
        "position_embedding_type": kind if kind in ("yarn", "longrope") else "rope",
        "rotary_base": base,
    }
    default = _SHARES.get(model_type, 1.0)
    share = _number(rope, "partial_rotary_factor", _number(values, "partial_rotary_factor", default))
    if model_type in _SHARES:
        fields["rotary_percent"] = share
    elif share != 1:
        raise unsupported("partial_rotary_factor", share, "1.0")
    fields |= _scaled_fields(rope, kind, values, positions)
    if model_type in _BY_LAYER:
        fields |= _local_fields(local, rope, values, usual)
    if kind != "dynamic":
        return fields, ()
    note = f"rope_type dynamic has no effect on texts of up to max_position_embeddings {positions}"
    return fields, (f"{note}; longer ones need --rotary-ntk-factor",)


def rope_keys(model: Values, model_type: str) -> dict[str, Any]:
    """Return the keys of config.json."""
    rotated = int(model["kv_channels"] * model["rotary_percent"])
    base, scaling = ntk_base(model["rotary_base"], model["rotary_ntk_factor"], rotated), _scaling(model)
    found: dict[str, Any] = {"rope_theta": base, "rope_scaling": scaling or None}
    if model_type in _BY_LAYER:
        # Both spellings: version 4 knows no rope_parameters, and version 5 reads OLMo 3's local base there.
        full = {"rope_type": "default", "rope_theta": base, **scaling}
        local = {"rope_type": "default", "rope_theta": model["rotary_base_local"]}
        if model["rotary_base_local"] is None:
            local = full
        if model_type == "gemma3_text":
            found["rope_local_base_freq"] = local["rope_theta"]
        return found | {"rope_parameters": dict(zip(_LAYERS, (full, local), strict=True))}
    if model_type in _SHARES:
        found["partial_rotary_factor"] = model["rotary_percent"]
    if model_type == "phi3" and scaling:
        found["original_max_position_embeddings"] = model["yarn_original_max_position_embeddings"]
    return found


def _by_layer(values: Values) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rope of a model, or of its layers without a window; and that of the others where it has another."""
    new, old = (mapping(values, key, key) for key in ("rope_parameters", "rope_scaling"))
    rope, local = new or old, {}
    if new and values["model_type"] in _BY_LAYER:
        rope, local = (mapping(new, layers, f"{layers} of rope") for layers in _LAYERS)
        if not (rope and local):
            raise unfit("rope_parameters", new, f"an object with {' and '.join(_LAYERS)}")
        agree = rope | old == rope
    elif layers := next(filter(rope.__contains__, _LAYERS), None):
        raise unsupported(f"{layers} of rope", rope[layers], "omitted")
    else:
        agree = not old or rope == old
    if not agree:
        raise unsupported("rope_scaling", old, "omitted, because rope_parameters say something else")
    return rope, local


def _kind(rope: Values, model_type: str) -> str:
    kind = rope.get("rope_type", rope.get("type", "default"))
    known: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    if model_type == "phi3":
        kind, known = _OLD_NAMES.get(str(kind), kind), ("default", "longrope")
    if kind not in known:
        raise unsupported("rope_type", kind, either(known))
    return kind


def _scaled_fields(rope: Values, kind: str, values: Values, positions: int) -> dict[str, Any]:
    key = "original_max_position_embeddings"
    original = values.get(key)
    if kind in ("yarn", "llama3") and original not in (None, in_rope := rope.get(key, positions)):
        raise unsupported(key, original, f"{in_rope}, as in rope")
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": _number(rope, "factor", None)}
    if kind == "llama3":
        for key, value in _LLAMA3.items():
            if rope.get(key) != value:
                raise unsupported(key, rope.get(key), str(value))
        return {"use_rope_scaling": True, "rope_scaling_factor": _number(rope, "factor", None)}
    if kind == "yarn":
        return _yarn_fields(rope, values, positions)
    return _longrope_fields(rope, values, positions) if kind == "longrope" else {}


def _yarn_fields(rope: Values, values: Values, positions: int) -> dict[str, Any]:
    original = _length(rope.get("original_max_position_embeddings", positions))
    factor = _number(rope, "factor", max(1.0, positions / original))
    truncate = switch(rope, "truncate", usual=True)
    if values["model_type"] in _BY_LAYER and not truncate:
        raise unsupported("truncate of rope", truncate, "true")
    found = {
        "yarn_original_max_position_embeddings": original,
        "rotary_scaling_factor": factor,
        "yarn_beta_fast": _number(rope, "beta_fast", 32.0),
        "yarn_beta_slow": _number(rope, "beta_slow", 1.0),
        "yarn_correction_range_round_to_int": truncate,
    }
    if rope.get("attention_factor") is not None:
        wanted = _number(rope, "attention_factor", None)
        if math.isclose(wanted, 1 + 0.1 * math.log(factor), rel_tol=1e-9):
            return found
        if factor == 1:
            raise unsupported("attention_factor of rope", wanted, "1.0 with factor 1.0")
        return found | {"mscale": (wanted - 1) / (0.1 * math.log(factor)), "mscale_all_dim": 0.0}
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # transformers ignores one of them alone
        return found | {key: _number(rope, key, None) for key in ("mscale", "mscale_all_dim")}
    return found


def _longrope_fields(rope: Values, values: Values, positions: int) -> dict[str, Any]:
    original = _length(values.get("original_max_position_embeddings", 4096))
    factor = _number(rope, "factor", max(1.0, positions / original))
    if rope.get("attention_factor") is not None:  # √(1 + ln factor / ln original), the factor's only use
        wanted = _number(rope, "attention_factor", None)
        if wanted < 1:
            raise unsupported("attention_factor of rope", wanted, "1.0 or more")
        factor = original ** (wanted**2 - 1)
    found: dict[str, Any] = {
        "yarn_original_max_position_embeddings": original,
        "rotary_scaling_factor": factor,
    }
    for key in ("short_factor", "long_factor"):
        factors = rope.get(key)
        if not isinstance(factors, list) or not all(type(each) in (int, float) for each in factors):
            raise unfit(f"{key} of rope", factors, "a list of numbers")
        found[f"longrope_{key}"] = tuple(map(float, factors))
    return found


def _local_fields(local: Values, rope: Values, values: Values, usual: float) -> dict[str, Any]:
    """--rotary-base-local, unless layers with a window are rotated as the others are.

    `usual` is the base of a model whose layers say none; Gemma 3 has another one in these layers.
    """
    if local and local == rope:
        return {}
    if (kind := local.get("rope_type", local.get("type", "default"))) != "default":
        raise unsupported("rope_type of sliding_attention", kind, "default")
    if values["model_type"] == "gemma3_text":
        usual = _number(values, "rope_local_base_freq", 10_000.0)
    return {"rotary_base_local": _number(local, "rope_theta", usual)}


def _scaling(model: Values) -> dict[str, Any]:
    """The keys of rope_scaling; none without scaling, or if it is in the base."""
    kind, original = model["position_embedding_type"], model["yarn_original_max_position_embeddings"]
    if model["use_rope_scaling"]:
        return {"rope_type": "llama3", "factor": model["rope_scaling_factor"], **_LLAMA3}
    if factor := model["rotary_seq_len_interpolation_factor"]:
        return {"rope_type": "linear", "factor": factor}
    if kind == "rope":
        return {}
    found = {
        "rope_type": kind,
        "factor": model["rotary_scaling_factor"],
        "original_max_position_embeddings": original,
    }
    if kind == "longrope":
        return found | {
            "short_factor": list(model["longrope_short_factor"]),
            "long_factor": list(model["longrope_long_factor"]),
        }
    found |= {
        "beta_fast": model["yarn_beta_fast"],
        "beta_slow": model["yarn_beta_slow"],
        "truncate": model["yarn_correction_range_round_to_int"],
    }
    scales = model["mscale"], model["mscale_all_dim"]
    if all(scales):
        return found | {"mscale": scales[0], "mscale_all_dim": scales[1]}
    logarithm = 0.1 * math.log(model["rotary_scaling_factor"])
    return found | {"attention_factor": (1 + scales[0] * logarithm) / (1 + scales[1] * logarithm)}


def _number(values: Values, key: str, usual: float | None) -> float:
    """A number above 0; `usual` where there is no key, or null, which is an error if that is None."""
    if values.get(key) is None and usual is not None:
        return usual
    return positive(values, key, of=" of rope")


def _length(value: Any) -> int:
    if type(value) is not int or value < 2:
        raise unfit("original_max_position_embeddings", value, "an integer above 1")
    return value
