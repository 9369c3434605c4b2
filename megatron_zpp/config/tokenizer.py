"""Which tokenizer turns text into ids."""

from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, option, option_error

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
]


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Options):
    """tokenizer: text to ids"""

    tokenizer_type: TokenizerType | None = option(
        None,
        "Kind of tokenizer; default GPT2BPETokenizer with --vocab-file and --merge-file. "
        "GPTSentencePieceTokenizer is Megatron-LM's other name for SentencePieceTokenizer.",
    )
    tokenizer_model: str | None = option(
        None,
        "SentencePieceTokenizer: the .model file. HuggingFaceTokenizer: tokenizer.json or its directory.",
    )
    vocab_file: str | None = option(None, "GPT2BPETokenizer: vocab.json.")
    merge_file: str | None = option(None, "GPT2BPETokenizer: merges.txt.")
    vocab_size: int | None = option(
        None, "NullTokenizer: number of ids for text; the next id is end of document.", at_least=1
    )

    def check(self) -> None:
        """Fill in the type, then require its files and refuse those of other types."""
        if self.tokenizer_type is None and self.vocab_file is not None and self.merge_file is not None:
            object.__setattr__(self, "tokenizer_type", "GPT2BPETokenizer")  # nobody has seen the old value
        if self.tokenizer_type == "GPTSentencePieceTokenizer":
            object.__setattr__(self, "tokenizer_type", "SentencePieceTokenizer")
        needs = {
            "SentencePieceTokenizer": ("tokenizer_model",),
            "GPTSentencePieceTokenizer": ("tokenizer_model",),
            "GPT2BPETokenizer": ("vocab_file", "merge_file"),
            "HuggingFaceTokenizer": ("tokenizer_model",),
            "NullTokenizer": ("vocab_size",),
            None: (),
        }[self.tokenizer_type]
        for name in ("tokenizer_model", "vocab_file", "merge_file", "vocab_size"):
            flag, value = "--" + name.replace("_", "-"), getattr(self, name)
            if name in needs and value is None:
                raise option_error("--tokenizer-type", self.tokenizer_type, f"needs {flag}")
            if name not in needs and value is not None:
                whose = (
                    f"--tokenizer-type {self.tokenizer_type}"
                    if self.tokenizer_type
                    else "no --tokenizer-type"
                )
                raise option_error(flag, value, f"has no meaning with {whose}; omit it")
