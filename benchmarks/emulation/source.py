"""An endless synthetic language: every sample of a run is drawn once, and there is much to learn.

The next token comes from a mixture, whose parts ask a model for different things:

    55%  a successor of the last token, in the list of the sequence's topic (the topic shows in what came
         before, and changes now and then)
    20%  a successor of the token before the last
    15%  the token `lag` places back, a number that belongs to the sequence
    10%  any token, by Zipf's law

Successors are drawn by Zipf's law as well, 16 for each token. The language is a constant; a stream of it is
drawn from (stream, chunk), so any part of it can be drawn again.
"""

import numpy as np
import torch
from torch import Tensor

TOPICS, SUCCESSORS = 8, 16
LANGUAGE, HELD_OUT = 0x5EED, 0x4E1D  # keys of the tables and of the samples that no run trains on
CHUNK = 1024  # sequences that are drawn together
_PARTS = np.cumsum((0.55, 0.20, 0.15))
_TOPIC_CHANGES = 1 / 64


class Source:
    """Sequences of `length` tokens below `vocab_size`."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self._vocab_size, self._length = vocab_size, length
        generator = np.random.Generator(np.random.Philox(key=LANGUAGE))
        self._zipf = _cumulative(1.0 / np.arange(2, vocab_size + 2))
        draws = generator.random((TOPICS + 1, vocab_size, SUCCESSORS))
        self._tables = self._any(draws)  # the last one is of the token before the last
        self._ranked = _cumulative(1.0 / np.arange(1, SUCCESSORS + 1) ** 1.2)

    def sequences(self, stream: int, first: int, count: int) -> Tensor:
        """Sequences `first` to `first` + `count` - 1 of a stream, (count, length) int64 on the CPU."""
        chunks = range(first // CHUNK, -(-(first + count) // CHUNK))
        drawn = torch.cat([self._chunk(stream, chunk) for chunk in chunks])
        begin = first - chunks.start * CHUNK
        return drawn[begin : begin + count].long()

    def _chunk(self, stream: int, chunk: int) -> Tensor:
        generator = np.random.Generator(np.random.Philox(key=[stream, chunk]))
        tokens = np.empty((self._length, CHUNK), dtype=np.int32)
        topic = generator.integers(TOPICS, size=CHUNK)
        lag = generator.integers(2, max(3, self._length // 4), size=CHUNK)
        everyone = np.arange(CHUNK)
        for at in range(self._length):
            part, rank, change, word = generator.random((4, CHUNK))
            topic = np.where(change < _TOPIC_CHANGES, generator.integers(TOPICS, size=CHUNK), topic)
            new = self._any(word)
            if at >= 2:
                place = np.searchsorted(self._ranked, rank)
                by_last = self._tables[topic, tokens[at - 1], place]
                by_second = self._tables[TOPICS, tokens[at - 2], place]
                back = tokens[np.maximum(at - lag, 0), everyone]
                new = np.select([part < edge for edge in _PARTS], [by_last, by_second, back], new)
            tokens[at] = new
        return torch.from_numpy(np.ascontiguousarray(tokens.T))

    def _any(self, uniform: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._zipf, uniform).astype(np.int32)


def _cumulative(weights: np.ndarray) -> np.ndarray:
    """Upper edges of the parts of [0, 1) in proportion to weights; the last part has the rest."""
    return np.cumsum(weights / weights.sum())[:-1]
