"""Builds the tokenizer of --tokenizer-type."""

from dataclasses import replace
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.config.run import HUGGINGFACE
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.storage.location import Location
from megatron_zpp.tokenizer.base import Tokenizer
from megatron_zpp.tokenizer.files import MERGES, SENTENCEPIECE_MODEL, TOKENIZER, VOCAB

_SAVED: dict[str | None, dict[str, str]] = {  # settings that name a file, and its name in a checkpoint
    "SentencePieceTokenizer": {"tokenizer_model": SENTENCEPIECE_MODEL},
    "GPT2BPETokenizer": {"vocab_file": VOCAB, "merge_file": MERGES},
    "HuggingFaceTokenizer": {"tokenizer_model": TOKENIZER},
}


def saved_config(config: TokenizerConfig, directory: Location) -> TokenizerConfig:
    """Return the settings of the same tokenizer for its files, `Tokenizer.files`, in `directory`."""
    files = _SAVED.get(config.tokenizer_type, {})
    named: dict[str, Any] = {field: str(directory / name) for field, name in files.items()}
    return replace(config, **named)


def saved_names(config: TokenizerConfig) -> tuple[str, ...]:
    """Return the names in a checkpoint of the files that the tokenizer cannot do without."""
    return tuple(_SAVED.get(config.tokenizer_type, {}).values())


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer. Raises ValueError if no type is given or its files cannot be used.

    `TokenizerConfig.check` has made sure that the files or sizes of the type are given.
    """
    files = [getattr(config, field) for field in _SAVED.get(config.tokenizer_type, ())]
    if config.tokenizer_type == "SentencePieceTokenizer":
        from megatron_zpp.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(*files)
    if config.tokenizer_type == "GPT2BPETokenizer":
        from megatron_zpp.tokenizer.gpt2_bpe import GPT2BPETokenizer

        return GPT2BPETokenizer(*files)
    if config.tokenizer_type == "HuggingFaceTokenizer":
        from megatron_zpp.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer

        if files[0].startswith(HUGGINGFACE):
            from megatron_zpp.storage.hub import find_model

            files = [str(find_model("--tokenizer-model", files[0], weights=False)[1])]
        return HuggingFaceTokenizer(*files)
    if config.tokenizer_type == "NullTokenizer":
        from megatron_zpp.tokenizer.null import NullTokenizer

        assert config.vocab_size is not None
        return NullTokenizer(config.vocab_size)
    raise option_error("--tokenizer-type", config.tokenizer_type, "give the kind of tokenizer")
