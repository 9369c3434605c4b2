"""Turns a block of JSON lines into tokens: what one worker does."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.corpus.json_lines import parse_lines, split_lines
from megatron_zpp.data.corpus.problems import Problem, Problems
from megatron_zpp.data.indexed import token_dtype
from megatron_zpp.tokenizer import build_tokenizer

NO_TOKENS = "document without tokens"
NOT_TOKENISED = "document that the tokenizer refuses"


@dataclass(frozen=True)
class Encoded:
    """The documents of one block. All keys have the same documents."""

    tokens: tuple[np.ndarray, ...]  # one a key, each (tokens,)
    lengths: tuple[np.ndarray, ...]  # one a key, each (documents,), in tokens
    lines: int
    problems: Problems  # their lines counted from the block's first


class Encoder:
    """Encodes blocks of JSON lines; build it in the process that uses it.

    A line gives either one document under every key or, when there is anything wrong with one of its
    values, none at all: the n-th documents of two keys always come from the same line.
    """

    def __init__(self, config: TokenizerConfig, keys: Sequence[str], append_eod: bool) -> None:
        self._tokenizer = build_tokenizer(config)
        self._dtype = token_dtype(self._tokenizer.vocab_size)
        self._keys = keys
        self._end = [self._tokenizer.eod] if append_eod else []

    def __call__(self, block: bytes) -> Encoded:
        lines = split_lines(block)
        found: list[Problem] = []
        numbers: list[int] = []
        texts: list[str] = []  # the keys of one line stand side by side
        for parsed in parse_lines(lines, self._keys):
            if isinstance(parsed, Problem):
                found.append(parsed)
            else:
                numbers.append(parsed[0])
                texts += parsed[1]
        documents = iter(self._encode_texts(texts))
        rows: list[list[list[int]]] = []
        for number in numbers:
            row = list(itertools.islice(documents, len(self._keys)))
            problem = self._problem(number, row)
            if problem:
                found.append(problem)
            else:
                rows.append(row)
        columns = [self._pack([row[k] for row in rows]) for k in range(len(self._keys))]
        tokens, lengths = zip(*columns, strict=True)
        found.sort(key=lambda problem: problem.line)
        return Encoded(tokens, lengths, len(lines), Problems.of(found))

    def _encode_texts(self, texts: list[str]) -> list[list[int] | ValueError]:
        try:
            return self._tokenizer.encode_batch(texts)
        except ValueError:
            return [self._encode_one(text) for text in texts]  # one of them is at fault, the rest is not

    def _encode_one(self, text: str) -> list[int] | ValueError:
        try:
            return self._tokenizer.encode(text)
        except ValueError as error:
            return error

    def _problem(self, number: int, row: Sequence[list[int] | ValueError]) -> Problem | None:
        for key, document in zip(self._keys, row, strict=True):
            if isinstance(document, ValueError):
                return Problem(number, NOT_TOKENISED, f"{key!r}: {document}")
            if not document:
                return Problem(number, NO_TOKENS, f"{key!r} gives none")
        return None

    def _pack(self, documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens,) with each document's end, and (documents,) lengths."""
        lengths = np.array([len(document) + len(self._end) for document in documents], dtype=np.int64)
        parts = itertools.chain.from_iterable((document, self._end) for document in documents)
        flat = itertools.chain.from_iterable(parts)
        return np.fromiter(flat, dtype=self._dtype, count=int(lengths.sum())), lengths
