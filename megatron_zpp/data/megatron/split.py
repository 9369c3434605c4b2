"""The samples of one split in Megatron-LM's order: how many of each data set, and their blend."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.data.blend import BlendedDataset
from megatron_zpp.data.megatron.dataset import MegatronDataset, MegatronOrders, normalized
from megatron_zpp.data.order_cache import OrderCache
from megatron_zpp.data.split import DatasetSlice

_SURPLUS = 0.005  # samples of each data set beyond its share of a blend, relative


def megatron_samples(
    config: DataConfig,
    flag: str,
    split: str,
    parts: Sequence[DatasetSlice],
    requested: int | None,
    *,
    seq_length: int,
    vocab_size: int,
    seed: int,
    say: Callable[[str], None],
) -> MegatronDataset | BlendedDataset:
    """Return `requested` samples of the data sets of `flag`; None requests every sample of one epoch.

    Indexes are cached in --data-cache-path, or beside the data for all its runs; `say` gets a line when one
    is built. A single data set, and each data set of a blend with weights, is repeated as often as needed. A
    blend without weights has one epoch of each. Raises ValueError if that is fewer samples than requested,
    and for weights without a number of samples.
    """

    cache = OrderCache.of(config, parts[0].source.local, say)
    orders = MegatronOrders(cache, seq_length, vocab_size, seed)

    def dataset(part: DatasetSlice, samples: int | None) -> MegatronDataset:
        return orders.dataset(part.source, part.first, part.last, samples, split)

    weighted = parts[0].weight is not None
    if len(parts) == 1 and not (weighted and flag == "--data-path"):
        return dataset(parts[0], requested)
    shown = [part.source.prefix for part in parts]
    if weighted and requested is None:
        fix = f"{flag} has weights, and Megatron-LM's blend with weights never ends; use --eval-iters"
        raise option_error("--full-validation", "(given)", fix)
    size = requested
    if weighted and requested is not None:
        weights = normalized(np.array([part.weight for part in parts], np.float64)).tolist()
        shares = [math.ceil(requested * weight) for weight in weights]
        sources = [
            dataset(part, math.ceil(share * (1 + _SURPLUS)))
            for part, share in zip(parts, shares, strict=True)
        ]
        size = sum(shares)
    else:
        sources = [dataset(part, None) for part in parts]
        weights, available = [len(source) for source in sources], sum(map(len, sources))
        if size is not None and size > available:
            fix = (
                f"the run requests {size} {split} samples, but one epoch of each has {available}; "
                "Megatron-LM repeats data sets only if they have weights: put a weight before each prefix"
            )
            raise option_error(flag, shown, fix)
    blend = orders.blend(sources, weights, size, split)
    _check_supply(flag, shown, sources, blend.blend.counts(size or sum(map(len, sources))))
    return blend


def _check_supply(
    flag: str, shown: Sequence[str], sources: Sequence[MegatronDataset], counts: np.ndarray
) -> None:
    """Raise ValueError if the blend draws more from a data set than its index holds.

    This can happen in a blend of many data sets with few samples each, despite Megatron-LM's surplus.
    """
    for source, count in zip(sources, counts.tolist(), strict=True):
        if count > len(source):
            fix = (
                f"the blend draws {count} samples of {source.source.prefix}, but Megatron-LM's order has "
                f"{len(source)}, where Megatron-LM fails as well; use --dataset-order windows"
            )
            raise option_error(flag, shown, fix)
