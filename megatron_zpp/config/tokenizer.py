"""Which tokenizer turns text into ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_zpp.config.options import Options, count, flag_name, option_error, optional

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
]
_SENTENCEPIECE = ("GPTSentencePieceTokenizer", "Llama2Tokenizer")  # other names, which Megatron-LM has


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Options):
    """tokenizer: text to ids"""

    tokenizer_type: TokenizerType | None = optional(
        "Kind of tokenizer; default GPT2BPETokenizer with --vocab-file and --merge-file. "
        "GPTSentencePieceTokenizer and Llama2Tokenizer are Megatron-LM's other names for "
        "SentencePieceTokenizer."
    )
    tokenizer_model: str | None = optional(
        "SentencePieceTokenizer: the .model file. HuggingFaceTokenizer: tokenizer.json, its directory, "
        "or hf:ORG/NAME[@REVISION] of the hub."
    )
    vocab_file: str | None = optional("GPT2BPETokenizer: vocab.json.")
    merge_file: str | None = optional("GPT2BPETokenizer: merges.txt.")
    vocab_size: int | None = count(
        None, "NullTokenizer: number of ids for text; the next id is end of document."
    )

    def check(self) -> None:
        """Fill in the type, then require its files and refuse those of other types."""
        kind = resolved_type(vars(self))
        object.__setattr__(self, "tokenizer_type", kind)  # nobody has seen the old value
        needs = {
            "SentencePieceTokenizer": ("tokenizer_model",),
            "GPT2BPETokenizer": ("vocab_file", "merge_file"),
            "HuggingFaceTokenizer": ("tokenizer_model",),
            "NullTokenizer": ("vocab_size",),
            None: (),
        }[kind]
        for name in ("tokenizer_model", "vocab_file", "merge_file", "vocab_size"):
            flag, value = flag_name(name), getattr(self, name)
            if name in needs and value is None:
                raise self.error("tokenizer_type", f"needs {flag}")
            if name not in needs and value is not None:
                whose = f"--tokenizer-type {kind}" if kind else "no --tokenizer-type"
                raise option_error(flag, value, f"has no meaning with {whose}; omit it")


def resolved_type(settings: Mapping[str, Any]) -> str | None:
    """Return the type that values of TokenizerConfig give: that of --tokenizer-type, or of the files."""
    kind = settings.get("tokenizer_type")
    if kind is None and None not in (settings.get("vocab_file"), settings.get("merge_file")):
        return "GPT2BPETokenizer"
    return "SentencePieceTokenizer" if kind in _SENTENCEPIECE else kind
