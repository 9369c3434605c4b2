"""A SentencePiece model."""

import hashlib
from collections.abc import Sequence

from megatron_zpp.config.options import option_error
from megatron_zpp.tokenizer.base import Tokenizer, check_unicode
from megatron_zpp.tokenizer.files import SENTENCEPIECE_MODEL, read_bytes

_FIX = "give a SentencePiece .model file, such as data/train_tokenizer.py writes"


class SentencePieceTokenizer(Tokenizer):
    """Pieces of a SentencePiece model; its end of sentence is our end of document."""

    kind = "SentencePieceTokenizer"

    def __init__(self, model: str) -> None:
        """`model`: a .model file. Raises ValueError when it is not one, or has no end of sentence."""
        import sentencepiece

        content = read_bytes("--tokenizer-model", model, _FIX)
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except (RuntimeError, UnicodeDecodeError):  # the second where its message quotes a damaged piece
            raise option_error("--tokenizer-model", model, f"is not a SentencePiece model; {_FIX}") from None
        self.vocab_size = self._model.get_piece_size()
        self.eod = self._model.eos_id()
        if self.eod < 0:
            raise option_error(
                "--tokenizer-model", model, "has no end-of-sentence piece; train one without --eos_id=-1"
            )
        self.files = {SENTENCEPIECE_MODEL: content}
        self.fingerprint = hashlib.sha256(self.kind.encode() + b"\0" + content).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return self._model.encode(list(texts), num_threads=1)
        except (RuntimeError, TypeError):  # what `sentencepiece` says of half a surrogate pair
            check_unicode(texts)
            raise

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids))

    def to_tokenizers(self) -> str:
        from megatron_zpp.tokenizer.sentencepiece_pipeline import to_pipeline

        return to_pipeline(self.files[SENTENCEPIECE_MODEL])
