"""Sliding windows in config.json and in ModelConfig's fields.

Mistral and StarCoder2: `sliding_window` tokens in all layers. Qwen2 and Qwen3: `sliding_window` with
`use_sliding_window`, in layers from `max_window_layers` on. `layer_types` name the layers instead, also of a
Mistral.
"""

from typing import Any

from megatron_zpp.config.shapes.config_json import Values, switch, unfit, unsupported, whole
from megatron_zpp.config.values.attention_window import describe_pattern, parse_pattern, parse_window

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ALL_LAYERS = ("mistral", "phi3", "starcoder2")
_SOME_LAYERS = ("qwen2", "qwen3", "gemma2", "gemma3_text", "olmo3")
_PERIODS = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}  # the last layer of each has no window


def window_fields(values: Values, layers: int, positions: int) -> dict[str, str]:
    """Return the fields of ModelConfig for the keys of config.json; none if no text would notice.

    A window that holds all `positions` changes nothing. Raises ValueError that names the key.
    """
    model_type = values["model_type"]
    by_layer = model_type in ("gemma3_text", "olmo3")  # layers with a window have another rope too
    usual = None if model_type in ("starcoder2", "phi3") else 4096
    window = values.get("sliding_window", usual)
    if model_type in ("qwen2", "qwen3") and not switch(values, "use_sliding_window", usual=False):
        window = None
    types = values.get("layer_types")
    if model_type not in (*_ALL_LAYERS, *_SOME_LAYERS) or window is None:
        if (types is not None or model_type in _PERIODS) and any(_windowed_layers(values, layers)):
            raise unsupported("layer_types", types, f"{_FULL} in all layers without a window")
        return {}
    if type(window) is not int or window < 1:
        raise unfit("sliding_window", window, "null or a positive integer")
    in_some = model_type in _SOME_LAYERS or (model_type == "mistral" and types is not None)
    windowed = _windowed_layers(values, layers) if in_some else [True] * layers
    if (window >= positions and not by_layer) or not any(windowed):
        return {}
    pattern = describe_pattern(windowed)
    return {"window_size": f"{window - 1},0"} | ({"window_attn_skip_freq": pattern} if pattern else {})


def window_keys(model: Values, model_type: str) -> dict[str, Any]:
    """Return the keys of config.json for the fields of a ModelConfig."""
    if model["window_size"] is None or model_type not in (*_ALL_LAYERS, *_SOME_LAYERS):
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


def _windowed_layers(values: Values, layers: int) -> list[bool]:
    model_type, types = values["model_type"], values.get("layer_types")
    if types is None and (every := _PERIODS.get(model_type)):
        if model_type == "gemma3_text":
            every = whole(values, "sliding_window_pattern", every, least=1, must_be="a positive integer")
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if types is None:
        first = whole(values, "max_window_layers", 28, least=0, must_be="0 or more")
        return [layer >= first for layer in range(layers)]
    known = isinstance(types, list) and all(kind in (_FULL, _SLIDING) for kind in types)
    if not known or len(types) != layers:
        fix = f"a list that names {_FULL} or {_SLIDING} for each of {layers} layers"
        raise unsupported("layer_types", types, fix)
    return [kind == _SLIDING for kind in types]
