"""No tokenizer: the text already is ids."""

from collections.abc import Sequence

from megatron_zpp.config.options import option_error
from megatron_zpp.tokenizer.base import Tokenizer, fingerprint_of


class NullTokenizer(Tokenizer):
    """Space-separated integers below `largest`, which itself is the end of document, as in Megatron-LM."""

    kind = "NullTokenizer"

    def __init__(self, largest: int) -> None:
        """Raise ValueError when the ids would not fit the int32 of data sets."""
        if largest >= 2**31:
            raise option_error(
                "--vocab-size", largest, "ids are stored in 32 bits, so give less than 2147483648"
            )
        self.vocab_size = largest + 1
        self.eod = largest
        self.fingerprint = fingerprint_of(self.kind, largest)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(map(self._ids, texts))

    def _ids(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(f"text of a {self.kind} is whole numbers below {self.eod}") from None
        for index in ids:
            if not 0 <= index < self.eod:
                raise ValueError(f"id {index} is not in [0, {self.eod})")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def to_tokenizers(self) -> None:
        return None
