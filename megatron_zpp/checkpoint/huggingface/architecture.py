"""The model that a Hugging Face directory describes, and how a run's flags compare with it."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import flag_name, option_error
from megatron_zpp.config.shapes.huggingface import CONFIG, FAMILIES, describe_model, huggingface_values
from megatron_zpp.config.values.json_file import read_json_object

# What a directory settles: every field of ModelConfig but names of presets, lengths, padding and dropout.
# The vocabulary depends on the tokenizer too (check_vocabulary).
_RUN_SETTINGS = (
    *("model_preset", "seq_length", "make_vocab_size_divisible_by", "padded_vocab_size", "init_method_std"),
    *("attention_dropout", "hidden_dropout"),
)
_SPARE = 1024  # rows that a published model may have beyond its tokenizer's entries; Qwen2.5-7B has 399


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


def fit_vocabulary(named: NamedDirectory, theirs: Architecture, tokenizer: dict[str, Any]) -> ModelConfig:
    """Return the model with --padded-vocab-size if it has more rows than the tokenizer has entries.

    Raises ValueError if it has fewer, or so many more that this cannot be its tokenizer.
    """
    rows, entries = theirs.vocab_size, tokenizer["vocab_size"]
    if not entries <= rows < entries + _SPARE:
        raise named.error(
            f"has vocab_size {rows}, but this {tokenizer['tokenizer_type']} has {entries} entries; "
            "give the tokenizer of that model"
        )
    return replace(theirs.model, padded_vocab_size=rows) if rows > entries else theirs.model


def check_vocabulary(
    named: NamedDirectory, theirs: Architecture, flags: ModelConfig, tokenizer: dict[str, Any]
) -> None:
    """Raise ValueError unless a run with these flags has the vocabulary of the directory's model."""
    needed, entries = fit_vocabulary(named, theirs, tokenizer).padded_vocab_size, tokenizer["vocab_size"]
    if flags.vocabulary(entries) != theirs.vocab_size:
        given = "(not given)" if flags.padded_vocab_size is None else flags.padded_vocab_size
        right = "omit it" if needed is None else f"give --padded-vocab-size {needed}"
        raise option_error(
            "--padded-vocab-size",
            given,
            f"the model of {named.flag} {named.shown} has vocab_size {theirs.vocab_size}, and the tokenizer "
            f"{entries} entries; {right}",
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
