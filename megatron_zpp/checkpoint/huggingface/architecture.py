"""The model that a Hugging Face directory describes, and how a run's flags compare with it."""

from dataclasses import asdict, dataclass
from typing import Any

from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.config.huggingface_config import CONFIG, FAMILIES, describe_model, huggingface_values
from megatron_zpp.config.json_file import read_json_object
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import flag_name, option_error

# What a directory settles: every field of ModelConfig but names of presets, lengths, padding and dropout.
_RUN_SETTINGS = (
    *("model_preset", "seq_length", "make_vocab_size_divisible_by", "init_method_std"),
    *("attention_dropout", "hidden_dropout"),
)


@dataclass(frozen=True)
class Architecture:
    """A model as its config.json describes it; `notes` are lines for the person who imports it."""

    model: ModelConfig
    model_type: str
    vocab_size: int
    notes: tuple[str, ...] = ()


def read_architecture(named: NamedDirectory, divisible_by: int = 128) -> Architecture:
    """Return what config.json says. Raises ValueError, in one line, for a model that ours cannot be."""
    if not named.path.is_dir():
        raise named.error(f"is no directory; name one that holds {CONFIG} and model.safetensors")
    values = read_json_object(named.flag, str(named.path / CONFIG))
    try:
        described = describe_model(values)
    except ValueError as error:
        raise named.error(str(error)) from None
    try:
        model = ModelConfig(
            **described.fields,
            seq_length=described.fields["max_position_embeddings"],
            make_vocab_size_divisible_by=divisible_by,
        )
    except ValueError as error:
        raise named.error(f"{CONFIG}: {error}") from None
    return Architecture(model, described.model_type, described.vocab_size, described.notes)


def check_vocabulary(named: NamedDirectory, architecture: Architecture, tokenizer: dict[str, Any]) -> None:
    """Raise ValueError unless the tokenizer that `tokenizer` describes has as many ids as the model."""
    if tokenizer["vocab_size"] != architecture.vocab_size:
        raise named.error(
            f"has vocab_size {architecture.vocab_size}, but this {tokenizer['tokenizer_type']} has "
            f"{tokenizer['vocab_size']} entries; give the tokenizer of that model"
        )


def check_flags(named: NamedDirectory, theirs: Architecture, flags: ModelConfig) -> None:
    """Raise ValueError that names the first model flag which does not fit the directory's model."""
    keys = {name: key for key, name in FAMILIES[theirs.model_type].keys.items()}
    ours, needed = asdict(flags), asdict(theirs.model)
    if theirs.model_type != "gpt2" and ours["max_position_embeddings"] <= needed["max_position_embeddings"]:
        ours["max_position_embeddings"] = needed["max_position_embeddings"]  # no table: a run may be shorter
    for name, value in needed.items():
        if name in _RUN_SETTINGS or ours[name] == value:
            continue
        flag = flag_name(name)
        key = f"{keys[name]} {value}" if name in keys else f"{name} {value}"
        fix = f"the model of {named.flag} {named.shown} has {key}; give"
        if isinstance(value, bool):
            given, fix = ("(not given)", f"{fix} it") if value else ("(given)", f"{fix[:-4]}omit it")
            raise option_error(flag, given, fix)
        given = "(not given)" if ours[name] is None else ours[name]
        right = f"{flag} {value}" if value is not None else f"no {flag}"
        raise option_error(flag, given, f"{fix} {right}, or --model-preset {named.path / CONFIG}")


def config_json(named: NamedDirectory, model: ModelConfig, vocab_size: int, eod: int) -> dict[str, Any]:
    """Return the contents of config.json. Raises ValueError for a model that no class of transformers is."""
    try:
        return huggingface_values(asdict(model), vocab_size, eod)
    except ValueError as error:
        raise named.error(str(error)) from None
