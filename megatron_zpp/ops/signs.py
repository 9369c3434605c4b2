"""The random signs of a rotation: equal on all senders and receivers of a sum."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Signs:
    """The counter of the random signs of a run of elements (reference_rotation.py says how bits are drawn).

    `first` is the number of the first element inside its unit, a multiple of 128.
    """

    seed: int
    unit: int
    iteration: int
    first: int = 0

    def packed(self) -> tuple[int, int, int, int]:
        """As operators take them."""
        return self.seed, self.unit, self.iteration, self.first
