"""The training samples of one island: sample n of island k of M is sample n·M + k of the order of all."""

from dataclasses import dataclass, replace

import numpy as np

from megatron_zpp.config.islands import IslandsConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.data.documents import ModelInputs
from megatron_zpp.data.resume import ResumedData
from megatron_zpp.data.samples import Epochs, Samples


@dataclass(frozen=True)
class IslandSamples(Samples):
    """Every sample of `samples` whose number leaves the remainder `number` when divided by `islands`."""

    samples: Samples
    number: int
    islands: int

    @property
    def windows_per_epoch(self) -> int | None:
        there = self.samples.windows_per_epoch
        return None if there is None else there // self.islands

    def epochs(self, samples: int) -> list[Epochs]:
        """How often all islands together read each data set, if each reads as many samples."""
        parts = self.samples.epochs(samples * self.islands)
        return [part._replace(name=f"{part.name} (by {self.islands} islands)") for part in parts]

    def describe(self) -> str:
        return f"{self.samples.describe()}; island {self.number + 1} of {self.islands} reads its share"

    def batch(self, indices: np.ndarray) -> np.ndarray | ModelInputs:
        return self.samples.batch(np.asarray(indices, np.int64) * self.islands + self.number)


def share_of(resumed: ResumedData, islands: IslandsConfig) -> ResumedData:
    """Return `resumed`, of the samples of all, with the samples of this island.

    Raises ValueError for a changed blend: it changes at a sample of all, and islands were at different ones.
    """
    if resumed.lines:  # on the change
        fix = "data sets and weights cannot change while islands run; give those of the checkpoint"
        raise option_error("--islands-at", islands.islands_at, fix)
    return replace(resumed, samples=IslandSamples(resumed.samples, islands.number, islands.count))
