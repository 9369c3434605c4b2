"""Text to ids and back, without torch; each library is imported by the type that needs it."""

from megatron_zpp.tokenizer.base import Tokenizer, describe
from megatron_zpp.tokenizer.build import build_tokenizer

__all__ = ["Tokenizer", "build_tokenizer", "describe"]
