"""Builds the tokenizer that the settings ask for."""

from megatron_zpp.config.options import option_error
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.tokenizer.base import Tokenizer


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Raises ValueError, with flag, value and fix, when there is no type or when its files cannot serve."""
    if config.tokenizer_type == "SentencePieceTokenizer":
        from megatron_zpp.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(config.tokenizer_model)
    if config.tokenizer_type == "GPT2BPETokenizer":
        from megatron_zpp.tokenizer.gpt2_bpe import GPT2BPETokenizer

        return GPT2BPETokenizer(config.vocab_file, config.merge_file)
    if config.tokenizer_type == "HuggingFaceTokenizer":
        from megatron_zpp.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer(config.tokenizer_model)
    if config.tokenizer_type == "NullTokenizer":
        from megatron_zpp.tokenizer.null import NullTokenizer

        return NullTokenizer(config.vocab_size)
    raise option_error("--tokenizer-type", config.tokenizer_type, "say which kind of tokenizer")
