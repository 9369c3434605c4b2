"""Builds the tokenizer of --tokenizer-type."""

from megatron_zpp.config.options import option_error
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.tokenizer.base import Tokenizer


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer. Raises ValueError if no type is given or its files cannot be used.

    `TokenizerConfig.check` has made sure that the files or sizes of the type are given.
    """
    if config.tokenizer_type == "SentencePieceTokenizer":
        from megatron_zpp.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer

        assert config.tokenizer_model is not None
        return SentencePieceTokenizer(config.tokenizer_model)
    if config.tokenizer_type == "GPT2BPETokenizer":
        from megatron_zpp.tokenizer.gpt2_bpe import GPT2BPETokenizer

        assert config.vocab_file is not None
        assert config.merge_file is not None
        return GPT2BPETokenizer(config.vocab_file, config.merge_file)
    if config.tokenizer_type == "HuggingFaceTokenizer":
        from megatron_zpp.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer

        assert config.tokenizer_model is not None
        return HuggingFaceTokenizer(config.tokenizer_model)
    if config.tokenizer_type == "NullTokenizer":
        from megatron_zpp.tokenizer.null import NullTokenizer

        assert config.vocab_size is not None
        return NullTokenizer(config.vocab_size)
    raise option_error("--tokenizer-type", config.tokenizer_type, "give the kind of tokenizer")
