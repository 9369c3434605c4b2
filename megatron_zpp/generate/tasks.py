"""The evaluation tasks, and the figures computed from scores: perplexity of texts, last words of LAMBADA.

An evaluation is a list of passages; it does not matter who scores which. Sums are exact (math.fsum), so the
figures do not depend on their order.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.config.values.text import JSON_LINES, plain_suffix
from megatron_zpp.data.corpus.texts import read_documents
from megatron_zpp.generate.scoring import Passage, Score, sliding_passages
from megatron_zpp.tokenizer.base import Tokenizer

_refused = partial(option_error, "--valid-data")  # of a file, or a line of it, and the remedy
Outcome = tuple[float, int]  # of a passage: the sum of its log-probabilities, and whether it was greedy


@dataclass(frozen=True)
class Task:
    """Passages to score, and the counts that their scores are divided by."""

    name: str
    passages: list[Passage]
    documents: int
    words: int
    characters_utf8: int

    def figures(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """The result, from the outcome of each passage."""
        nats, right = -math.fsum(total for total, _ in outcomes), sum(greedy for _, greedy in outcomes)
        tokens = sum(passage.scored for passage in self.passages)
        means = {"tokens": tokens, "loss": nats / tokens, "token_perplexity": _exp(nats / tokens)}
        figures: dict[str, Any] = {"documents": self.documents}
        if self.name == "lambada":
            return figures | {"right": right, "accuracy": right / self.documents} | means
        words = {"words": self.words, "word_perplexity": _exp(nats / self.words)}
        return figures | means | words | {"bits_per_byte": nats / math.log(2) / self.characters_utf8}


def outcome_of(score: Score) -> Outcome:
    """The part of a score that the figures need."""
    return math.fsum(score.log_probabilities), int(score.greedy)


def perplexity_task(
    files: Sequence[str], json_key: str, tokenizer: Tokenizer, *, width: int, stride: int
) -> Task:
    """Every token of every document, each document by itself after an end of document, or `<bos>`."""
    before = tokenizer.before_text
    passages, documents, words, size = [], 0, 0, 0
    for path, text in _documents(files, json_key):
        ids = _encode(tokenizer, path, text)
        passages += sliding_passages([*before, *ids], width, stride, len(before))
        documents, words, size = documents + 1, words + len(text.split()), size + len(text.encode())
    return Task("perplexity", passages, documents, words, size)


def lambada_task(files: Sequence[str], json_key: str, tokenizer: Tokenizer, *, width: int) -> Task:
    """The last word of each line, after the words before it."""
    for path in files:
        if plain_suffix(path) not in JSON_LINES:
            raise _refused(path, f"LAMBADA is JSON lines: its name must end in {' or '.join(JSON_LINES)}")
    texts = list(_documents(files, json_key))
    passages = [last_word(tokenizer, path, text, width) for path, text in texts]
    size = sum(len(text.encode()) for _, text in texts)
    return Task("lambada", passages, len(texts), len(texts), size)


def last_word(tokenizer: Tokenizer, path: str, text: str, width: int) -> Passage:
    """The tokens of a text, of which those of its last word are scored.

    A token that spans the end of the previous word and the beginning of this one belongs to this one. A text
    of one word comes after an end of document.
    """
    text = text.strip()
    if not text:
        raise _refused(path, "has a text without a word; omit it")
    before = text[: -len(text.split()[-1])].rstrip()
    ids, context = _encode(tokenizer, path, text), tokenizer.encode(before) if before else []
    shared = 0
    while shared < min(len(ids) - 1, len(context)) and ids[shared] == context[shared]:
        shared += 1
    whole = [*(tokenizer.begin if shared else tokenizer.before_text), *ids]
    scored = len(ids) - shared
    if scored > width:
        raise _refused(path, f"its last word {text.split()[-1][:20]!r}… has {scored} tokens of {width}")
    return Passage(whole[-(width + 1) :], scored)


def _documents(files: Sequence[str], json_key: str) -> Iterator[tuple[str, str]]:
    """(file, text) of each document. Raises ValueError for a line that holds none: nothing is omitted."""
    for path in files:
        found = False
        for block in read_documents(path, json_key):
            for problem in block.problems:
                raise _refused(f"{path} line {problem.line}", f"{problem.kind}: {problem.detail}")
            for text in block.texts:
                found = found or not text.isspace()
                yield path, text
        if not found:
            raise _refused(path, "is empty; give a file with text")


def _encode(tokenizer: Tokenizer, path: str, text: str) -> list[int]:
    try:
        ids = tokenizer.encode(text)
    except ValueError as error:
        raise _refused(path, f"the tokenizer of the checkpoint refuses it: {error}") from None
    if not ids:
        raise _refused(path, f"the tokenizer of the checkpoint has no tokens for {text[:20]!r}")
    return ids


def _exp(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)  # NaN stays NaN
