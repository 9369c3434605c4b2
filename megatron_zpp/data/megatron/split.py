"""What Megatron-LM builds of the data sets of one split: how many samples of which, mixed how."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_zpp.config.options import option_error
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.megatron.dataset import MegatronDataset, MegatronOrders, normalized
from megatron_zpp.data.samples import Samples

_SURPLUS = 0.005  # of each data set of a blend, so that a share that is rounded up is there


@dataclass(frozen=True)
class DatasetSlice:
    """The sequences [first, last) of a data set, and its weight in the blend; None where none is given."""

    weight: float | None
    source: IndexedDataset
    first: int
    last: int


def build_split(
    orders: MegatronOrders, flag: str, split: str, parts: Sequence[DatasetSlice], requested: int | None
) -> Samples:
    """`requested` samples of what `flag` names; None is every sample of one epoch.

    A data set alone is repeated as often as the samples need, and so is each of a blend with weights. Without
    weights it is one epoch of each. Raises ValueError when these have fewer samples than are asked for, and
    for weights without a number of samples.
    """

    def dataset(part: DatasetSlice, samples: int | None) -> MegatronDataset:
        return orders.dataset(part.source, part.first, part.last, samples, split)

    weighted = parts[0].weight is not None
    if len(parts) == 1 and not (weighted and flag == "--data-path"):
        return dataset(parts[0], requested)
    shown = [part.source.prefix for part in parts]
    if weighted and requested is None:
        fix = f"{flag} has weights, and Megatron-LM's blend of them has no end; use --eval-iters"
        raise option_error("--full-validation", "(given)", fix)
    if weighted:
        weights = normalized(np.array([part.weight for part in parts], np.float64)).tolist()
        shares = [math.ceil(requested * weight) for weight in weights]
        sources = [
            dataset(part, math.ceil(share * (1 + _SURPLUS)))
            for part, share in zip(parts, shares, strict=True)
        ]
        size = sum(shares)
    else:
        sources, size = [dataset(part, None) for part in parts], requested
        weights, there = [len(source) for source in sources], sum(map(len, sources))
        if size is not None and size > there:
            fix = (
                f"the run asks for {size} {split} samples, and one epoch of each has {there}; Megatron-LM "
                "repeats data sets that have weights only: give a weight before each prefix"
            )
            raise option_error(flag, shown, fix)
    blend = orders.blend(sources, weights, size, split)
    _check_supply(flag, shown, sources, blend.blend.counts(size or sum(map(len, sources))))
    return blend


def _check_supply(
    flag: str, shown: Sequence[str], sources: Sequence[MegatronDataset], counts: np.ndarray
) -> None:
    """Many data sets of few samples each can be drawn from more often than Megatron-LM's surplus allows."""
    for source, count in zip(sources, counts.tolist(), strict=True):
        if count > len(source):
            fix = (
                f"the blend takes {count} samples of {source.source.prefix}, and Megatron-LM's order has "
                f"{len(source)}, with which it ends in an error itself; use --dataset-order windows"
            )
            raise option_error(flag, shown, fix)
