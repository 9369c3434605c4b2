"""What every source of samples offers, whatever it reads."""

from typing import Any, NamedTuple, Protocol

import numpy as np


class Epochs(NamedTuple):
    """How often some samples read all of a data set."""

    name: str  # as it was given
    times: float
    about: bool = False  # estimated from what of a text is tokenised


class Samples(Protocol):
    """A numbered sequence of samples of S + 1 tokens, as long as the run needs it; picklable, for workers."""

    @property
    def windows_per_epoch(self) -> int | None:
        """Samples that are read before text repeats; None when it never does, or nobody knows."""

    def batch(self, indices: np.ndarray) -> Any:
        """Samples by number: (len,) integers of 0 or more to (len, S + 1) int64, or documents.ModelInputs."""

    def epochs(self, samples: int) -> list[Epochs]:
        """How often the first so many samples read each data set that knows."""

    def describe(self) -> str:
        """One line for the head of a run."""


class KnownSamples(Samples, Protocol):
    """Samples of one data set, which a resumed run recognises."""

    @property
    def name(self) -> str:
        """The data set as it was given."""

    def fingerprint(self) -> str:
        """The same for a copy elsewhere, another for other contents; it stays in checkpoints."""


class SeededSamples(KnownSamples, Protocol):
    """Samples of one data set in an order that a seed decides, each as near as the first."""

    def with_seed(self, seed: int) -> "SeededSamples":
        """The same data set in the order of another seed."""
