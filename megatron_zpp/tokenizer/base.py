"""The interface of tokenizers."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar


class Tokenizer(ABC):
    """Text to ids and back.

    Text is never interpreted: a document that spells out a special token, `<|endoftext|>` say, is encoded
    as the characters that it is. Ids lie in [0, vocab_size).
    """

    kind: ClassVar[str]  # the name that --tokenizer-type gives it
    vocab_size: int  # the largest id plus one, without padding
    eod: int  # end of document
    begin: tuple[int, ...] = ()  # ids before a text that is scored or continued; `encode` omits them
    fingerprint: str  # SHA-256 in hex of all that decides which ids a text gets, wherever its files lie
    # What it was read from, by the names in a checkpoint; `build.saved_config` has settings to read it again.
    files: Mapping[str, bytes] = MappingProxyType({})

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without an end of document. Raises ValueError for text it has no ids for."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on the calling thread: parallelism is the caller's to arrange."""

    @property
    def before_text(self) -> tuple[int, ...]:
        """What stands before a text: what begins it, or the end of the document before."""
        return self.begin or (self.eod,)

    @property
    def published_begin(self) -> tuple[int, ...]:
        """What transformers puts before a text, such as `<bos>`."""
        return ()

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that do not form a character become U+FFFD."""

    @abstractmethod
    def to_tokenizers(self) -> str | None:
        """A tokenizer.json whose pipeline gives texts these ids; None where text has no tokenizer.

        In it special tokens are special, also where a text spells them. Raises ValueError when there is none.
        """


class PipelineTokenizer(Tokenizer):
    """A pipeline of Hugging Face's `tokenizers`; `_encoder` is the same, or one that knows fewer pieces."""

    _pipeline: Any
    _encoder: Any

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # what `tokenizers` says of half a surrogate pair
            check_unicode(texts)
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._pipeline.decode(list(ids), skip_special_tokens=False)


def check_unicode(texts: Sequence[str]) -> None:
    """Raise ValueError for a text with half a surrogate pair, which UTF-8 has no bytes for.

    JSON can spell one, and Python reads bytes of a command line that are not UTF-8 as such.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            lone = ascii(text[error.start])[1:-1]
            raise ValueError(f"holds half a surrogate pair, {lone}; give text in UTF-8") from None


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the record by which a data set or checkpoint recognises its tokenizer."""
    return {
        "tokenizer_type": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "fingerprint": tokenizer.fingerprint,
    }


def in_words(description: dict[str, Any]) -> str:
    """Return what `describe` returned, in words."""
    short = str(description.get("fingerprint", ""))[:12]
    return f"{description.get('tokenizer_type')} of {description.get('vocab_size')} entries ({short})"


def fingerprint_of(kind: str, content: Any) -> str:
    """SHA-256 in hex of `kind` and a JSON value, the same for every order of an object's keys."""
    canonical = json.dumps([kind, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
