"""Real text for pairs of runs: samples of the token files of corpus/make_tokens.py.

The training tokens are cut into samples, which lie in one fixed random order. Run after run takes the next
ones: those of a run are distinct, and runs of neighbouring seeds share none until all have been taken. Then
they lie in another order. A run of more samples than there are takes all of them, in an order of its seed,
and then some of them once more.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.storage.files import write_text

TRAINING, HELD_OUT = "training-*_text_document.idx", "held_out-*_text_document.idx"
ORDER = 0x7E87  # the key of the order
EPOCHS = 2  # in which a run reads a sample at most once each


class Text:
    """Samples of `length` tokens of the files in `folder`."""

    def __init__(self, folder: Path, length: int) -> None:
        self._folder, self._length = folder, length

    @staticmethod
    def described(folder: Path) -> dict[str, int | str]:
        """What decides the samples: tokens, entries of the vocabulary, and a digest of the index files."""
        digest, tokens = hashlib.sha256(), 0
        for pattern in (TRAINING, HELD_OUT):
            for path in sorted(folder.glob(pattern)):
                digest.update(path.read_bytes())
                tokens += path.with_suffix(".bin").stat().st_size // 2 if pattern == TRAINING else 0
        if not tokens:
            raise SystemExit(f"--text {folder}: no {TRAINING} in it; corpus/make_tokens.py writes them")
        vocabulary = len(json.loads((folder / "vocab.json").read_text()))
        return {"tokens": tokens, "vocabulary": vocabulary, "sha256": digest.hexdigest()[:16]}

    def training(self, seed: int, count: int) -> Tensor:
        """(count, length) int64 on the CPU, equal for equal seeds and counts."""
        windows = self._training.windows
        if count > EPOCHS * windows:
            raise SystemExit(f"{count} samples of {self._length} tokens: there are {EPOCHS} × {windows}")
        if count > windows:
            turns = EPOCHS * seed, EPOCHS * seed + 1
            parts = zip((windows, count - windows), turns, strict=True)
            return torch.cat([self._training.samples(0, part, turn) for part, turn in parts])
        turn, place = divmod(seed, windows // count)
        return self._training.samples(place * count, count, turn)

    def held_out(self, count: int) -> Tensor:
        """The same of text that no run trains on."""
        return self._held_out.samples(0, count)

    @cached_property
    def _training(self) -> "_Windows":
        return _Windows(sorted(self._folder.glob(TRAINING)), self._length)

    @cached_property
    def _held_out(self) -> "_Windows":
        return _Windows(sorted(self._folder.glob(HELD_OUT)), self._length)


class _Windows:
    """The samples of some files; what is left at the end of a file belongs to none."""

    def __init__(self, indexes: list[Path], length: int) -> None:
        self._files = [IndexedDataset(path.with_suffix("")).tokens for path in indexes]
        self._ends = np.cumsum([len(tokens) // length for tokens in self._files])
        self._length, self.windows = length, int(self._ends[-1])

    def samples(self, first: int, count: int, turn: int = 0) -> Tensor:
        """Samples `first` to `first` + `count` - 1 of the order of a turn, which begins again at its end."""
        order = np.random.Generator(np.random.Philox(key=[ORDER, turn])).permutation(self.windows)
        rows = np.empty((count, self._length), dtype=np.int64)
        for row, window in enumerate(order[np.arange(first, first + count) % self.windows]):
            file = int(np.searchsorted(self._ends, window, side="right"))
            begin = (window - (self._ends[file - 1] if file else 0)) * self._length
            rows[row] = self._files[file][begin : begin + self._length]
        return torch.from_numpy(rows)


def coarser(folder: Path, entries: int) -> Path:
    """A folder beside `folder` with its tokens in a vocabulary of `entries`, made unless it is there.

    Entries are the first ones of byte-level BPE, and the end of documents. Every other token becomes the
    parts that it was merged from.
    """
    made = folder.with_name(f"{folder.name}-{entries}")
    if (made / "vocab.json").exists():
        return made
    made.mkdir(exist_ok=True)
    vocabulary: dict[str, int] = json.loads((folder / "vocab.json").read_text())
    merges = [line.split(" ") for line in (folder / "merges.txt").read_text().splitlines()[1:]]
    parts = _parts(vocabulary, merges, entries)
    lengths = np.array([len(part) for part in parts])
    begins, flat = np.cumsum(lengths) - lengths, np.concatenate(parts)
    for index in sorted([*folder.glob(TRAINING), *folder.glob(HELD_OUT)]):
        tokens = IndexedDataset(index.with_suffix("")).tokens[:]
        counts = lengths[tokens]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        with IndexedDatasetWriter(made / index.stem, np.dtype(np.uint16)) as writer:
            writer.add_document(flat[np.repeat(begins[tokens], counts) + within])
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    kept = [*words[: entries - 1], words[-1]]  # the last is the end of documents
    write_text(made / "vocab.json", json.dumps({word: token for token, word in enumerate(kept)}))
    return made


def _parts(vocabulary: dict[str, int], merges: list[list[str]], entries: int) -> list[np.ndarray]:
    """By token: the tokens below `entries` that it becomes. A token follows those it was merged from."""
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    merged = {left + right: (left, right) for left, right in reversed(merges)}
    parts: list[np.ndarray] = []
    for token, word in enumerate(words[:-1]):
        if token < entries - 1:
            parts.append(np.array([token], dtype=np.uint16))
        else:
            left, right = merged[word]
            parts.append(np.concatenate([parts[vocabulary[left]], parts[vocabulary[right]]]))
    return [*parts, np.array([entries - 1], dtype=np.uint16)]
