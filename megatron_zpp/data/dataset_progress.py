"""How far each data set of a run is read, as its checkpoints keep it, and the order from there on."""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_zpp.config.data import weighted_prefixes
from megatron_zpp.data.blend import Blend

_LIMIT = 2**48  # of any count of samples


@dataclass(frozen=True)
class SourceProgress:
    """One data set of a run, present or past."""

    prefix: str
    fingerprint: str  # "" where an older checkpoint does not tell
    stream: int  # which order of samples it has; it keeps it whatever becomes of the list
    # 0 once it is left out; None for its tokens, where an older checkpoint does not tell
    weight: float | None
    consumed_before: int  # samples of it that were read before `since`

    def __post_init__(self) -> None:
        counts = (self.stream, self.consumed_before)
        weighs = self.weight is None or (type(self.weight) is float and 0 <= self.weight < math.inf)
        named = type(self.prefix) is str and type(self.fingerprint) is str
        if not (named and weighs and all(type(count) is int and 0 <= count < _LIMIT for count in counts)):
            raise ValueError(f"not a valid record of one data set's progress: {self}")


@dataclass(frozen=True)
class DatasetProgress:
    """The data sets of a run since its weights last changed; those that it reads come first."""

    order: str  # --dataset-order
    since: int  # the first sample of the present weights
    sets: tuple[SourceProgress, ...]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "DatasetProgress":
        """The inverse of `asdict`. Raises ValueError, KeyError or TypeError for anything else."""
        names = [field.name for field in fields(SourceProgress)]
        entries = [dict(entry) for entry in value["sets"]]
        for entry in entries:
            if "given" in entry:  # as format version 2 calls it
                entry["consumed_before"] = entry.pop("given")
        sets = tuple(SourceProgress(*(entry[name] for name in names)) for entry in entries)
        found = cls(value["order"], value["since"], sets)
        if type(found.order) is not str or type(found.since) is not int or not 0 <= found.since < _LIMIT:
            raise ValueError(f"not a valid record of dataset progress: {value}")
        if not found.reading or found.sets[: len(found.reading)] != found.reading:
            raise ValueError("a run reads a data set, and those that it reads come first")
        return found

    @classmethod
    def from_settings(cls, data: dict[str, Any]) -> "DatasetProgress | None":
        """What is known of a run of the `data` settings that kept none: the same weights from the start."""
        entries = tuple(data.get("data_path") or data.get("train_data_path") or ())
        try:
            parts = weighted_prefixes("--data-path", entries)
        except ValueError:
            return None
        sets = (
            SourceProgress(prefix, "", number, weight, 0) for number, (weight, prefix) in enumerate(parts)
        )
        return cls(data.get("dataset_order") or "windows", 0, tuple(sets)) if parts else None

    @property
    def reading(self) -> tuple[SourceProgress, ...]:
        """The data sets that it reads."""
        return tuple(part for part in self.sets if part.weight != 0)

    def consumed_by(self, consumed: int) -> list[int]:
        """How many samples of each data set are read when `consumed` are, from `since` on."""
        weights = tuple(part.weight for part in self.reading)
        counts = Blend(weights).counts(consumed - self.since).tolist()
        counts += [0] * (len(self.sets) - len(counts))
        return [part.consumed_before + count for part, count in zip(self.sets, counts, strict=True)]


@dataclass(frozen=True)
class ResumedBlend:
    """The order of `blend` from sample `since` on; `consumed_before` counts earlier samples of each set."""

    blend: Blend
    since: int
    consumed_before: tuple[int, ...]

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the data sets."""
        return self.blend.weights

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(data set, its sample number), each (len,) int64, for (len,) sample numbers from `since` on."""
        which, numbers = self.blend.locate(np.asarray(indices) - self.since)
        return which, numbers + np.array(self.consumed_before)[which]

    def counts(self, samples: int) -> np.ndarray:
        """(K,): how many of the first `samples`, at least `since`, each data set gives."""
        return self.blend.counts(samples - self.since) + np.array(self.consumed_before)
