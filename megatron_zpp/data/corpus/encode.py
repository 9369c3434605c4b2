"""Encodes a block of JSON lines as tokens: the work of one worker."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.corpus.json_lines import Problem, parse_lines, split_lines
from megatron_zpp.data.indexed import token_dtype
from megatron_zpp.tokenizer import build_tokenizer

NO_TOKENS = "document without tokens"
NOT_TOKENISED = "document that the tokenizer rejects"


@dataclass(frozen=True)
class Encoded:
    """The documents of one block, the same number for every key."""

    tokens: tuple[np.ndarray, ...]  # one array (tokens,) per key
    lengths: tuple[np.ndarray, ...]  # one array (documents,) per key, in tokens
    lines: int
    problems: list[Problem]  # with line numbers within the block


class Encoder:
    """Encodes blocks of JSON lines; create it in the process that uses it.

    A line holds one document for every key, or none if any of its values has a problem. So the n-th documents
    of all keys come from the same line.
    """

    def __init__(self, config: TokenizerConfig, keys: Sequence[str], append_eod: bool) -> None:
        self._tokenizer = build_tokenizer(config)
        self._dtype = token_dtype(self._tokenizer.vocab_size)
        self._keys = keys
        self._end = [self._tokenizer.eod] if append_eod else []

    def __call__(self, block: bytes) -> Encoded:
        lines = split_lines(block)
        parsed = list(parse_lines(lines, self._keys))
        texts = [text for each in parsed if not isinstance(each, Problem) for text in each[1]]
        documents = iter(self._encode_texts(texts))  # len(keys) consecutive ones per line
        rows: list[list[list[int]]] = []
        found: list[Problem] = []
        for each in parsed:
            row = each if isinstance(each, Problem) else self._checked(each[0], documents)
            if isinstance(row, Problem):
                found.append(row)
            else:
                rows.append(row)
        columns = [self._pack([row[k] for row in rows]) for k in range(len(self._keys))]
        tokens, lengths = zip(*columns, strict=True)
        return Encoded(tokens, lengths, len(lines), found)

    def _encode_texts(self, texts: list[str]) -> Sequence[list[int] | ValueError]:
        try:
            return self._tokenizer.encode_batch(texts)
        except ValueError as error:
            if len(texts) == 1:
                return [error]
            # To find out which texts are at fault.
            return [found for text in texts for found in self._encode_texts([text])]

    def _checked(self, number: int, documents: Iterator[list[int] | ValueError]) -> list[list[int]] | Problem:
        """Take the documents of line `number`, and return them, or the first problem of one of them."""
        row = []
        for key, document in list(zip(self._keys, documents, strict=False)):
            if isinstance(document, ValueError):
                return Problem(number, NOT_TOKENISED, f"{key!r}: {document}")
            if not document:
                return Problem(number, NO_TOKENS, f"{key!r} has none")
            row.append(document)
        return row

    def _pack(self, documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens (tokens,), with each end of document, and the lengths (documents,)."""
        lengths = np.array([len(document) + len(self._end) for document in documents], dtype=np.int64)
        parts = itertools.chain.from_iterable((document, self._end) for document in documents)
        flat = itertools.chain.from_iterable(parts)
        return np.fromiter(flat, dtype=self._dtype, count=int(lengths.sum())), lengths
