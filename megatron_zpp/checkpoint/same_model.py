"""Refuses a checkpoint of another model or tokenizer than the run's."""

from collections.abc import Mapping
from typing import Any

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import flag_name, option_error
from megatron_zpp.config.sources.checkpoint_arguments import MODEL
from megatron_zpp.storage.location import Location
from megatron_zpp.tokenizer.base import in_words

TABLES = ("embedding.tokens.weight", "head.output.weight")  # with a row for each entry of the vocabulary


def check_tokenizer(path: Location, saved: dict[str, Any], present: dict[str, Any]) -> None:
    """Raise ValueError unless both tokenizers are the same."""
    if saved != present:
        differ = f"was trained with {in_words(saved)}, this run has {in_words(present)}"
        raise ValueError(f"{path}: {differ}; give the tokenizer flags of that run")


def check_units(
    path: Location,
    saved: list[dict[str, Any]],
    present: list[dict[str, Any]],
    saved_model: Any,
    model: ModelConfig | None,
) -> None:
    """Raise ValueError unless both have the same whole parameters; layouts and tensor ranks may differ.

    The same vocabulary may be padded to another multiple. The error names the flag that differs if the
    settings of both models tell it: `saved_model`, by field, of a run that may be of another version, and
    `model`, of this run.
    """
    theirs, ours = (
        {name: entry for unit in units for name, entry in unit["parameters"].items()}
        for units in (saved, present)
    )
    fix = f"use the {'model and splits' if model is None else 'model flags'} that it was saved with"
    for name in sorted(theirs.keys() ^ ours.keys()):
        where = "missing from it" if name in ours else "not part of this model"
        raise _other_flag(path, saved_model, model) or ValueError(f"{path}: {name} is {where}; {fix}")
    same_vocabulary = (  # before it is padded: the tokenizers are the same
        isinstance(saved_model, Mapping)
        and model is not None
        and saved_model.get("padded_vocab_size", -1) == model.padded_vocab_size
    )
    for name, entry in ours.items():
        was, now = tuple(theirs[name]["shape"]), tuple(entry["shape"])
        padded = name in TABLES and was[1:] == now[1:] and same_vocabulary
        if was != now and not padded:
            raise _other_flag(path, saved_model, model) or ValueError(
                f"{path}: {name} has shape {was}, this model needs {now}; {fix}"
            )


_OF_PARAMETERS = (  # the flags that decide which parameters there are; first those that others follow from
    *("num_layers", "hidden_size", "ffn_hidden_size", "kv_channels", "num_attention_heads"),
    *("num_query_groups", "position_embedding_type", "max_position_embeddings", "normalization"),
    *("swiglu", "geglu", "disable_bias_linear", "add_qkv_bias", "qk_layernorm", "qk_layernorm_across_heads"),
    *("norm_placement", "embed_layernorm"),
    *("untie_embeddings_and_output_weights", "padded_vocab_size", "make_vocab_size_divisible_by"),
)


def _other_flag(path: Location, saved: Any, present: ModelConfig | None) -> ValueError | None:
    """The error of the first flag that differs and changes parameters; None if no flag is known to."""
    if not isinstance(saved, Mapping) or present is None:
        return None
    for name in _OF_PARAMETERS:
        was, now, flag = saved.get(name), getattr(present, name), flag_name(name)
        if was == now or was is None or now is None:
            continue
        if name == "max_position_embeddings" and present.position_embedding_type != "learned_absolute":
            continue
        if isinstance(now, bool):
            shown, fix = ("(given)", "omit it, or give") if now else ("(not given)", "give it, or")
            with_or_without = "without" if now else "with"
            return option_error(flag, shown, f"{path} was saved {with_or_without} it; {fix} {MODEL}")
        return option_error(flag, now, f"the model of {path} has {was}; give {was}, or {MODEL}")
    return None
