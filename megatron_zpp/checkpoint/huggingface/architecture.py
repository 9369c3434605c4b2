"""The model that a Hugging Face directory describes."""

from dataclasses import dataclass, replace
from typing import Any

from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.shapes.huggingface import CONFIG, DescribedModel, describe_model
from megatron_zpp.config.values.json_file import read_json_object

_LENGTH = 4096  # tokens, at most, of a sample by default; the longest text may not fit a GPU
_SPARE = 1024  # rows that a published model may have beyond its tokenizer's entries; Qwen2.5-7B has 399


@dataclass(frozen=True, kw_only=True)
class Architecture(DescribedModel):
    """A model as its config.json describes it, and as ours."""

    model: ModelConfig


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
            seq_length=min(described.fields["max_position_embeddings"], _LENGTH),
            make_vocab_size_divisible_by=divisible_by,
        )
    except ValueError as error:
        raise named.error(f"{CONFIG}: {error}") from None
    return Architecture(**vars(described), model=model)


def fit_vocabulary(named: NamedDirectory, theirs: Architecture, tokenizer: dict[str, Any]) -> ModelConfig:
    """Return the model with --padded-vocab-size if it has more rows than the tokenizer has entries.

    Raises ValueError if it has fewer, or so many more that this cannot be its tokenizer.
    """
    rows, entries = theirs.vocab_size, tokenizer["vocab_size"]
    if not entries <= rows < entries + _SPARE:
        has = f"has vocab_size {rows}, but this {tokenizer['tokenizer_type']} has {entries} entries"
        raise named.error(f"{has}; give the tokenizer of that model")
    return replace(theirs.model, padded_vocab_size=rows) if rows > entries else theirs.model


def check_vocabulary(
    named: NamedDirectory, theirs: Architecture, flags: ModelConfig, tokenizer: dict[str, Any]
) -> None:
    """Raise ValueError unless a run with these flags has the vocabulary of the directory's model."""
    entries = tokenizer["vocab_size"]
    fit_vocabulary(named, theirs, tokenizer)
    if flags.vocabulary(entries) != theirs.vocab_size:
        raise flags.error(
            "padded_vocab_size",
            f"the model of {named.flag} {named.shown} has vocab_size {theirs.vocab_size}, and the tokenizer "
            f"{entries} entries; omit it",
        )
