"""Trains a SentencePiece model whose decode(encode(text)) is the text."""

import io
import re
from collections.abc import Iterable, Iterator
from typing import Literal

from megatron_zpp.config.options import option_error

ModelType = Literal["bpe", "unigram"]

# Training never puts these into pieces, yet source code is full of them.
_WHITESPACE_PIECES = ("\n", "\n\n", "\t", "\t\t", "\r\n")
_LONGEST_LINE = 4096  # bytes; SentencePiece omits longer ones by default, and is slow with them

# Sums of floats are split by threads: a fixed number, so that the model does not depend on the machine.
_THREADS = 8


def train_sentencepiece(passages: Iterable[str], vocab_size: int, model_type: ModelType) -> bytes:
    """The .model file's bytes.

    Bytes stand in for characters without a piece; no text is normalised, trimmed or prefixed. The one
    character that does not survive is U+2581, which SentencePiece itself writes for a space. Ids 0, 1 and 2
    are unknown, beginning and end of document. Raises ValueError, naming --vocab-size and a number that
    is possible, when the text is too little for that many pieces or holds more characters than that.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(passages),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=list(_WHITESPACE_PIECES),
            max_sentence_length=2 * _LONGEST_LINE,
            num_threads=_THREADS,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise _explain(str(error), vocab_size) from None
    return model.getvalue()


def _lines(passages: Iterable[str]) -> Iterator[str]:
    for passage in passages:
        for line in passage.split("\n"):
            for start in range(0, len(line), _LONGEST_LINE // 4):
                yield line[start : start + _LONGEST_LINE // 4]


def _explain(message: str, vocab_size: int) -> ValueError:
    if too_high := re.search(r"value <= (\d+)", message):
        return option_error(
            "--vocab-size", vocab_size, f"the text is enough for {too_high[1]} pieces at most"
        )
    if too_low := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return option_error(
            "--vocab-size", vocab_size, f"bytes and frequent characters alone take {too_low[1]}; give more"
        )
    if "sentences_.empty()" in message:
        return ValueError("--input holds no text to train on")
    return ValueError(f"SentencePiece: {message}")
