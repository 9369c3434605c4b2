"""How a parameter is cut, among tensor ranks or into blocks of rows: arithmetic on shapes, and the cut."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """A parameter of which each of T tensor ranks has an equal part along dimension `dim`.

    `runs` are the lengths of consecutive parts of the whole dimension, each of which is cut by itself: the
    rows of queries, keys and values of an attention layer, or gate and value of SwiGLU. Rank r has part r of
    the first run, then part r of the second, and so on. T divides every run.
    """

    dim: int
    runs: tuple[int, ...]

    def local_shape(self, whole: Sequence[int], ranks: int) -> tuple[int, ...]:
        """The shape of one rank's part."""
        return (*whole[: self.dim], whole[self.dim] // ranks, *whole[self.dim + 1 :])

    def whole_shape(self, local: Sequence[int], ranks: int) -> tuple[int, ...]:
        """The shape of the parameter whose parts have the shape `local`."""
        return (*local[: self.dim], local[self.dim] * ranks, *local[self.dim + 1 :])

    def indices(self, ranks: int, rank: int) -> list[range]:
        """Where the part of `rank` lies in the whole dimension, run by run."""
        found, start = [], 0
        for run in self.runs:
            part = run // ranks
            found.append(range(start + rank * part, start + (rank + 1) * part))
            start += run
        return found

    def part(self, whole: Tensor, ranks: int, rank: int) -> Tensor:
        """The part of one rank, a copy unless it is a single run."""
        parts = [whole.narrow(self.dim, run.start, len(run)) for run in self.indices(ranks, rank)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `part`, from the parts of all ranks."""
        ranks = len(parts)
        cut = [part.split([run // ranks for run in self.runs], self.dim) for part in parts]
        return torch.cat([cut[rank][run] for run in range(len(self.runs)) for rank in range(ranks)], self.dim)

    def to_json(self) -> dict[str, Any]:
        """The split as JSON values."""
        return {"dim": self.dim, "runs": list(self.runs)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Split":
        """The inverse of `to_json`. Raises ValueError, KeyError or TypeError for other values."""
        dim, runs = value["dim"], tuple(value["runs"])
        if (
            type(dim) is not int
            or dim < 0
            or not runs
            or not all(type(run) is int and run > 0 for run in runs)
        ):
            raise ValueError(f"not a split of a parameter: {value!r}")
        return cls(dim, runs)


@dataclass(frozen=True)
class RowBlock:
    """The rows of a table of `entries` rows, from row `first` on, that are a parameter of their own."""

    first: int
    entries: int

    def whole_shape(self, block: Sequence[int]) -> tuple[int, ...]:
        """The shape of the table, a block of which has the shape `block`."""
        return (self.entries, *block[1:])

    def first_element(self, block: Sequence[int]) -> int:
        """The number of a block's first element in the flat table."""
        return self.first * math.prod(block[1:])
