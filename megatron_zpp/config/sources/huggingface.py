"""--load hf:: the shape and the tokenizer of a Hugging Face model, which flags must not contradict."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_zpp.config.model import NOT_SHAPE, ModelConfig, preset_fields
from megatron_zpp.config.options import flag_name, option_error, usage_errors
from megatron_zpp.config.run import CheckpointConfig
from megatron_zpp.config.sources.provided import Provided
from megatron_zpp.config.tokenizer import TokenizerConfig

_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model that --load names; with the tokenizer beside it, or another one that flags gave."""

    load: str  # hf:DIR, or hf:ORG/NAME@COMMIT of the hub
    model: ModelConfig
    keys: Mapping[str, str]  # of config.json, by the field of ModelConfig
    tokenizer: TokenizerConfig
    notes: tuple[str, ...] = ()


ReadModel = Callable[[str, TokenizerConfig | None], HuggingFaceModel]


def read_model(provided: Provided, read: ReadModel) -> HuggingFaceModel:
    """Return the model of --load hf:. Raises UsageError for flags of checkpoints beside it, and as `read`."""
    given = provided.values["tokenizer"]
    with usage_errors():
        checkpoint = CheckpointConfig(**provided.values["checkpoint"])
        tokenizer = TokenizerConfig(**given) if any(name in given for name in _TOKENIZER) else None
    assert checkpoint.load is not None  # the caller has seen that it names such a model
    return read(checkpoint.load, tokenizer)


def obey_model(provided: Provided, found: HuggingFaceModel) -> tuple[str, ...]:
    """Fill `provided` with the shape and the tokenizer; return notes.

    Raises ValueError that names both values if a flag, a file of settings or a preset contradicts the model.
    """
    source = f"--load {found.load}"
    provided.values["checkpoint"]["load"] = found.load
    given, notes = provided.values["model"], found.notes
    _check(given, found)
    given.pop("model_preset", None)
    if "seq_length" not in given:
        longest = given.get("max_position_embeddings", found.model.max_position_embeddings)
        length = min(found.model.seq_length, longest)
        provided.fill("model", "seq_length", length, source)
        if length < longest:
            notes += (f"--seq-length {length}: by default, of up to {longest}",)
    provided.fill_all("model", found.model, source)
    if not any(name in provided.values["tokenizer"] for name in _TOKENIZER):
        provided.fill_all("tokenizer", found.tokenizer, source)
    return notes


def _check(given: Mapping[str, Any], found: HuggingFaceModel) -> None:
    theirs, preset = asdict(found.model), given.get("model_preset")
    ours = dict(given)
    if preset is not None:  # which implies values for all fields, but for GPTs not the longest text
        longest = preset_fields(preset).get("max_position_embeddings", theirs["max_position_embeddings"])
        ours = asdict(ModelConfig(**{"seq_length": 1, "max_position_embeddings": longest} | ours))
    for name, value in ours.items():
        if name in (*NOT_SHAPE, "model_preset") or _same(found.model, name, value):
            continue
        has_table = found.model.position_embedding_type == "learned_absolute"
        if name == "max_position_embeddings" and not has_table and value <= theirs[name]:
            continue  # a run may be shorter
        key = f"{found.keys.get(name, name)} {theirs[name]}"
        of_model = f"the model of --load {found.load} has {key}; omit it"
        if name in given:
            raise option_error(flag_name(name), "(given)" if value is True else value, of_model)
        raise option_error("--model-preset", preset, f"has {name} {value}, and {of_model}")


def _same(model: ModelConfig, name: str, value: Any) -> bool:
    """Return whether a value, as a person spells it, is that of `model`."""
    if getattr(model, name) == value:
        return True
    try:
        return getattr(replace(model, **{name: value}), name) == getattr(model, name)
    except ValueError:  # no such model is possible
        return False
