"""Sliding windows in config.json and in ModelConfig's fields.

Mistral and StarCoder2: `sliding_window` tokens in all layers. Qwen2 and Qwen3: `sliding_window` with
`use_sliding_window`, in layers from `max_window_layers` on, or in those that `layer_types` names.
"""

from collections.abc import Mapping
from typing import Any

from megatron_zpp.config.values.attention_window import describe_pattern, parse_pattern, parse_window
from megatron_zpp.config.values.json_file import shown

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ALL_LAYERS = ("mistral", "phi3", "starcoder2")
_SOME_LAYERS = ("qwen2", "qwen3", "gemma2", "gemma3_text", "olmo3")
_PERIODS = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}  # the last layer of each has no window


def window_fields(values: Mapping[str, Any], layers: int, positions: int) -> dict[str, str]:
    """Return the fields of ModelConfig for the keys of config.json; none if no text would notice.

    A window that holds all `positions` changes nothing. Raises ValueError that names the key.
    """
    model_type = values["model_type"]
    by_layer = model_type in ("gemma3_text", "olmo3")  # layers with a window have another rope too
    usual = None if model_type in ("starcoder2", "phi3") else 4096
    window = values.get("sliding_window", usual)
    if model_type not in (*_ALL_LAYERS, *_SOME_LAYERS) or window is None:
        return {}
    if model_type in ("qwen2", "qwen3") and not _used(values):
        return {}
    if type(window) is not int or window < 1:
        raise ValueError(
            f"config.json: sliding_window is {shown(window)}; must be null or a positive integer"
        )
    windowed = [True] * layers if model_type in _ALL_LAYERS else _windowed_layers(values, layers)
    if (window >= positions and not by_layer) or not any(windowed):
        return {}
    pattern = describe_pattern(windowed)
    return {"window_size": f"{window - 1},0"} | ({"window_attn_skip_freq": pattern} if pattern else {})


def window_keys(model: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the keys of config.json for the fields of a ModelConfig."""
    if model["window_size"] is None:
        if model_type in _PERIODS:
            return {"layer_types": [_FULL] * model["num_layers"]}
        return {}
    tokens = parse_window(model["window_size"])
    if model_type in _ALL_LAYERS:
        return {"sliding_window": tokens}
    layers, pattern = model["num_layers"], model["window_attn_skip_freq"]
    windowed = parse_pattern(pattern, layers) if pattern else (True,) * layers
    types = [_SLIDING if one else _FULL for one in windowed]
    if model_type in _PERIODS:
        return {"sliding_window": tokens, "layer_types": types}
    return {
        "use_sliding_window": True,
        "sliding_window": tokens,
        "max_window_layers": windowed.index(True),
        "layer_types": types,
    }


def _used(values: Mapping[str, Any]) -> bool:
    used = values.get("use_sliding_window", False)
    if type(used) is not bool:
        raise ValueError(f"config.json: use_sliding_window is {shown(used)}; must be true or false")
    return used


def _windowed_layers(values: Mapping[str, Any], layers: int) -> list[bool]:
    first, types = values.get("max_window_layers", 28), values.get("layer_types")
    if types is None and (period := _PERIODS.get(values["model_type"])):
        gemma3 = values["model_type"] == "gemma3_text"
        every = values.get("sliding_window_pattern", period) if gemma3 else period
        if type(every) is not int or every < 1:
            raise ValueError(
                f"config.json: sliding_window_pattern is {shown(every)}; must be a positive integer"
            )
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if types is None:
        if type(first) is not int or first < 0:
            raise ValueError(f"config.json: max_window_layers is {shown(first)}; must be 0 or more")
        return [layer >= first for layer in range(layers)]
    known = isinstance(types, list) and all(kind in (_FULL, _SLIDING) for kind in types)
    if not known or len(types) != layers:
        raise ValueError(
            f"config.json: layer_types {shown(types)} is not supported; must name {_FULL} or {_SLIDING} for "
            f"each of {layers} layers"
        )
    return [kind == _SLIDING for kind in types]
