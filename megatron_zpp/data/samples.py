"""Interfaces of sources of samples."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np


class Epochs(NamedTuple):
    """How often a number of samples reads a whole data set."""

    name: str  # as given on the command line
    times: float
    about: bool = False  # estimated, because only part of a text is tokenised


@dataclass(frozen=True)
class ShardRecord:
    """One file of a data set, as it was when a checkpoint was saved."""

    name: str  # absolute path, or URL without the revision
    contents: str  # digest of its size and parts of it, or the identifier that a server gives
    modified: int  # ns; 0 for a URL

    def __post_init__(self) -> None:
        if (type(self.name), type(self.contents), type(self.modified)) != (str, str, int):
            raise ValueError(f"not a valid record of a shard: {self}")


class BatchSource(Protocol):
    """Anything that returns numbered samples; picklable, for worker processes."""

    @abstractmethod
    def batch(self, indices: np.ndarray) -> Any:
        """Samples by number: (len,) integers of 0 or more to (len, S + 1) int64, or documents.ModelInputs.

        Packed documents are (len, 3, S) int64 before they become ModelInputs (packing.py). Raises ValueError
        for a token outside the vocabulary, and for text that has changed or has a line without a document.
        """


class Samples(BatchSource):
    """A numbered sequence of samples of S + 1 tokens, as long as the run needs it."""

    @property
    @abstractmethod
    def windows_per_epoch(self) -> int | None:
        """Samples before text repeats; None if it never does, or if the number is unknown."""

    @abstractmethod
    def epochs(self, samples: int) -> list[Epochs]:
        """How often the first `samples` samples read each data set, where that is known."""

    @abstractmethod
    def describe(self) -> str:
        """One line for the head of the log."""


class Source(ABC):
    """A data set, which a resumed run recognises."""

    name: str  # as given on the command line

    @abstractmethod
    def fingerprint(self) -> str:
        """An identifier that is kept in checkpoints: equal for copies, different for other contents."""

    def older_fingerprints(self) -> tuple[str, ...]:
        """The identifiers of the same contents in checkpoints of earlier versions."""
        return ()

    def shards(self) -> tuple[ShardRecord, ...]:
        """The files, in their order; none if the data set is not sharded."""
        return ()


class KnownSamples(Samples):
    """Samples of one data set."""

    source: Source

    def with_seed(self, seed: int) -> "KnownSamples":
        """The same data set in the order of another seed; any sample is found as fast as the first."""
        raise AssertionError(f"{self.source.name} has one order only")
