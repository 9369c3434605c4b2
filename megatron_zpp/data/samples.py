"""What every source of samples offers, whatever it reads."""

from typing import Protocol

import numpy as np


class Samples(Protocol):
    """An endless, numbered sequence of samples of S + 1 tokens; picklable, so that workers can have it."""

    @property
    def windows_per_epoch(self) -> int | None:
        """Samples that are read before text repeats; None when it never does."""

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """Samples by number: (len,) integers of 0 or more to (len, S + 1) int64."""

    def describe(self) -> str:
        """One line for the head of a run."""
