"""The store that all ranks of a run share, and the address of each rank."""

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from megatron_zpp.distributed.lifelines import Lifelines

SAY_AFTER = 10.0  # seconds of waiting between two messages


@dataclass(frozen=True)
class RankAddress:
    """Where a rank runs, and the address and interface from which it reaches rank 0."""

    host: str
    process: int
    address: str
    interface: str

    def __str__(self) -> str:
        return f"{self.host}, {self.interface} {self.address}"


@dataclass(frozen=True)
class Rendezvous:
    """The store that all ranks share, the address of this rank, and on rank 0 the addresses of all ranks."""

    store: dist.Store  # a JobStore, if there are several ranks
    own: RankAddress
    addresses: tuple[RankAddress, ...]
    lifelines: Lifelines | None = None  # they tell of ranks that end; None for a single rank

    @classmethod
    def of_one_rank(cls) -> "Rendezvous":
        """That of a run with one rank, which has nobody to meet."""
        alone = RankAddress(platform.node(), os.getpid(), "127.0.0.1", "lo")
        return cls(dist.HashStore(), alone, (alone,))


def ranges(numbers: Iterable[int]) -> str:
    """Return sorted numbers as text, such as "0, 2-5, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
