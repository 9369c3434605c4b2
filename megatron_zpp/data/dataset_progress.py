"""How far a run has read each of its data sets, as saved in checkpoints, and the order from there on."""

import math
from dataclasses import dataclass, fields
from typing import Any

from megatron_zpp.config.data import weighted_prefixes
from megatron_zpp.data.blend import Blend
from megatron_zpp.data.samples import ShardRecord

_LIMIT = 2**48  # an upper bound on counts of samples


@dataclass(frozen=True)
class SourceProgress:
    """One data set of a run, present or past."""

    prefix: str
    fingerprint: str  # "" if an older checkpoint has none
    stream: int  # number of its sample order, kept when the list of data sets changes
    # 0 if the run no longer reads the data set; None, in an older checkpoint, if the weight is its tokens
    weight: float | None
    consumed_before: int  # samples of it that were read before `since`
    shards: tuple[ShardRecord, ...] = ()  # its files, if it is text in shards

    def __post_init__(self) -> None:
        counts = (self.stream, self.consumed_before)
        weighs = self.weight is None or (type(self.weight) is float and 0 <= self.weight < math.inf)
        named = type(self.prefix) is str and type(self.fingerprint) is str
        if not (named and weighs and all(type(count) is int and 0 <= count < _LIMIT for count in counts)):
            raise ValueError(f"not a valid record of one data set's progress: {self}")


@dataclass(frozen=True)
class DatasetProgress:
    """The data sets of a run since its weights last changed; the data sets that the run reads come first."""

    order: str  # --dataset-order
    since: int  # the first sample of the present weights
    sets: tuple[SourceProgress, ...]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "DatasetProgress":
        """Return the inverse of `asdict`. Raises ValueError, KeyError or TypeError for anything else."""
        names = [field.name for field in fields(SourceProgress)]
        entries = [dict(entry) for entry in value["sets"]]
        for entry in entries:
            if "given" in entry:  # the key in format version 2
                entry["consumed_before"] = entry.pop("given")
            entry["shards"] = tuple(ShardRecord(**shard) for shard in entry.get("shards", ()))
        sets = tuple(SourceProgress(*(entry[name] for name in names)) for entry in entries)
        found = cls(value["order"], value["since"], sets)
        if type(found.order) is not str or type(found.since) is not int or not 0 <= found.since < _LIMIT:
            raise ValueError(f"not a valid record of dataset progress: {value}")
        if not found.reading or found.sets[: len(found.reading)] != found.reading:
            raise ValueError("a run must read a data set, and the data sets that it reads must come first")
        return found

    @classmethod
    def from_settings(cls, data: dict[str, Any]) -> "DatasetProgress | None":
        """Return the progress of a run with settings `data` that saved none, with constant weights."""
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
        """The data sets that the run reads."""
        return tuple(part for part in self.sets if part.weight != 0)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Weights of the data sets that the run reads; None if an older checkpoint does not know them all."""
        known = tuple(part.weight for part in self.reading if part.weight is not None)
        return known if len(known) == len(self.reading) else None

    def consumed_by(self, consumed: int) -> list[int]:
        """Return the samples of each data set that were read by sample `consumed`, `since` or later."""
        omitted = [part.consumed_before for part in self.sets if part.weight == 0]
        return [*self.blend.counts(consumed).tolist(), *omitted]

    @property
    def blend(self) -> Blend:
        """The order of the data sets that the run reads, from sample `since` on."""
        assert self.weights is not None, f"the weights are unknown: {self}"
        return Blend(self.weights, self.since, tuple(part.consumed_before for part in self.reading))
