"""How far a run has come, as checkpoints keep it."""

from dataclasses import dataclass
from typing import Any

from megatron_zpp.data.dataset_progress import DatasetProgress


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Dropout and data order follow from the seed and these counts.

    `run` is the run's name in logs, which a resumed run keeps. `dataset_progress` is how far the run has read
    each of its data sets; None if it reads none. `skipped_iterations` and `skipped_samples` count steps that
    did not change the weights; they are 0 in checkpoints of older versions. `ordered_samples` is the number
    of samples for which Megatron-LM's order was built; None for other orders, and in older versions.
    `evaluation_due`: a stop has abandoned the evaluation at this iteration, which the next start makes.
    `exchange_begun`: the samples up to which an exchange with other islands has begun, whose result has not
    been taken; None if there is none.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    skipped_samples: int = 0
    ordered_samples: int | None = None
    evaluation_due: bool = False
    exchange_begun: int | None = None
    run: str = ""
    dataset_progress: DatasetProgress | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Progress":
        """The inverse of `asdict`. Raises ValueError, KeyError or TypeError for other values."""
        value = dict(value)
        if "standing" in value:  # its name in format version 2
            value["dataset_progress"] = value.pop("standing")
        value.pop("products", None)  # algorithms of matmuls, which versions with --gemm-algorithms saved
        if value.get("dataset_progress") is not None:
            value["dataset_progress"] = DatasetProgress.from_json(value["dataset_progress"])
        # Without these two a run would begin anew.
        return cls(value.pop("iteration"), value.pop("consumed_samples"), **value)
