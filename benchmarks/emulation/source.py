"""An endless synthetic language: every sample of a run is drawn once, and there is much to learn.

Tokens belong to classes. The next token comes from a mixture, whose parts a model learns one after the other:

    45%  a successor of the last token's class
    15%  a successor of the class of the token before
    25%  a successor of the last token itself
    15%  any token, by Zipf's law

A class or token has 16 successors, which are drawn, and then chosen, by Zipf's law. The first part is learnt
within a few hundred steps and the rare tokens of the third never quite, so the loss falls smoothly. Nothing
depends on tokens further back. A language with copies from there was tried: models learn to copy all of a
sudden, chance decides when, and pairs scattered by 0.3% where they scatter by 0.01% now.

The language is a constant; a stream is drawn from (stream, chunk), so any part of it can be drawn again.
"""

import numpy as np
import torch
from torch import Tensor

CLASSES, SUCCESSORS = 64, 16
LANGUAGE, HELD_OUT = 0x5EED, 0x4E1D  # keys of the tables and of the samples that no run trains on
STREAMS = 1 << 32  # of training data: one for each seed, apart from HELD_OUT
CHUNK = 1024  # sequences that are drawn together
_PARTS = np.cumsum((0.45, 0.15, 0.25))


class Source:
    """Sequences of `length` tokens below `vocab_size`."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self._vocab_size, self._length = vocab_size, length
        generator = np.random.Generator(np.random.Philox(key=LANGUAGE))
        self._zipf = _cumulative(1.0 / np.arange(2, vocab_size + 2))
        self._class_of = generator.integers(CLASSES, size=vocab_size)
        self._after_class, self._after_second = self._any(generator.random((2, CLASSES, SUCCESSORS)))
        self._after_token = self._any(generator.random((vocab_size, SUCCESSORS)))
        self._ranked = _cumulative(1.0 / np.arange(1, SUCCESSORS + 1) ** 1.2)

    def training(self, seed: int, count: int) -> Tensor:
        """(count, length) int64 on the CPU that a run of this seed trains on."""
        return self.sequences(STREAMS + seed, 0, count)

    def held_out(self, count: int) -> Tensor:
        """The same that all runs are evaluated on."""
        return self.sequences(HELD_OUT, 0, count)

    def sequences(self, stream: int, first: int, count: int) -> Tensor:
        """Sequences `first` to `first` + `count` - 1 of a stream, (count, length) int64 on the CPU."""
        chunks = range(first // CHUNK, -(-(first + count) // CHUNK))
        drawn = torch.cat([self._chunk(stream, chunk) for chunk in chunks])
        begin = first - chunks.start * CHUNK
        return drawn[begin : begin + count].long()

    def _chunk(self, stream: int, chunk: int) -> Tensor:
        generator = np.random.Generator(np.random.Philox(key=[stream, chunk]))
        tokens = np.empty((self._length, CHUNK), dtype=np.int32)
        for at in range(self._length):
            part, rank, word = generator.random((3, CHUNK))
            new = self._any(word)
            if at >= 2:
                last, second = tokens[at - 1], tokens[at - 2]
                place = np.searchsorted(self._ranked, rank)
                by_class = self._after_class[self._class_of[last], place]
                by_second = self._after_second[self._class_of[second], place]
                by_token = self._after_token[last, place]
                new = np.select([part < edge for edge in _PARTS], [by_class, by_second, by_token], new)
            tokens[at] = new
        return torch.from_numpy(np.ascontiguousarray(tokens.T))

    def _any(self, uniform: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._zipf, uniform).astype(np.int32)


def _cumulative(weights: np.ndarray) -> np.ndarray:
    """Upper edges of the parts of [0, 1) in proportion to weights; the last part has the rest."""
    return np.cumsum(weights / weights.sum())[:-1]
