"""Differences between the model of a run and the model of the checkpoint that it loads.

Those that change a parameter are refused where the weights are read. Those here leave all shapes as they are.
They are logged and not refused, because they may be intended: longer texts ask for another --rotary-base.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.options import flag_name

_OF_THE_RUN = {  # what the weights mean does not depend on these
    *("model_preset", "seq_length", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("init_method_std", "attention_dropout", "hidden_dropout"),
    *("group_query_attention", "add_qkv_bias"),  # num_query_groups says it; all biases include these
}


def model_changes(saved: Mapping[str, Any], present: ModelConfig) -> list[str]:
    """Log lines on flags that give the weights of a checkpoint another meaning than in the run that saved it.

    `saved` are that run's settings by part and field. Fields of which an older version knew nothing have
    their defaults.
    """
    names = [field.name for field in fields(ModelConfig)]
    model = saved.get("model", {}).items()
    known = {name: value for name, value in model if name in names and name != "model_preset"}
    if not known:
        return []
    before, lines = ModelConfig(**known), []
    for name in names:
        was, now = getattr(before, name), getattr(present, name)
        if name not in _OF_THE_RUN and was != now:
            lines.append(f" WARNING: {flag_name(name)} was {_shown(was)} and is {_shown(now)}: {_MEANING}")
    return lines


def product_changes(saved: Mapping[str, Any], present: PrecisionConfig) -> list[str]:
    """Log lines on matmuls of layers whose formats or algorithms are not those of the run that saved."""
    lines = []
    was, now = bool(saved.get("precision", {}).get("fp8", False)), present.fp8
    if was != now:
        lines.append(
            f" WARNING: --fp8 was {_shown(was)} and is {_shown(now)}: products of layers are of other formats"
        )
    if saved.get("compilation", {}).get("gemm_algorithms") == "measured":
        lines.append(" WARNING: --gemm-algorithms was measured and is retired: bits may differ")
    return lines


_MEANING = "the weights are those of another model"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "given" if value else "not given"
    return "not given" if value is None else str(value)
