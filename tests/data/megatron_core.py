"""Reads files with megatron-core: the reference for our reader and orders."""

import importlib.util
import warnings
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    reason = "megatron-core is not installed; tests/requirements.txt names it"
    pytest.skip(reason, allow_module_level=True)


@cache
def core() -> SimpleNamespace:
    """What tests use of its modules, which take seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GPU libraries that its data sets have no use for
        from megatron.core.datasets import blended_megatron_dataset_builder as blended
        from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset
        from megatron.core.datasets.utils import get_blend_from_list
    modules = (blended, gpt_dataset, indexed_dataset)
    names = {name: value for module in modules for name, value in vars(module).items()}
    return SimpleNamespace(**names | {"helpers": helpers, "get_blend_from_list": get_blend_from_list})


def build(
    split_index: int,
    requested: int | None,
    *,
    seq_length: int,
    seed: int,
    blend: Sequence[str] = (),
    split: str | None = None,
    blends: Sequence[Sequence[str]] = (),
) -> Any:
    """Return its train, valid or test data set of that many samples, from one blend or one blend per split.

    Raises as it does: AssertionError or IndexError where it cannot.
    """
    tokenizer = SimpleNamespace(vocab_size=1000, eod=999, unique_identifiers={"name": "test"})
    its = core()
    config = its.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=its.get_blend_from_list(list(blend)) if blend else None,
        blend_per_split=[its.get_blend_from_list(list(own) or None) for own in blends] if blends else None,
        split=split,
        path_to_cache=None,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    if split is not None:  # without the others: it never returns if one of them has no tokens
        config.split_matrix = [
            part if i == split_index else None for i, part in enumerate(config.split_matrix)
        ]
    sizes = [requested if i == split_index else 1 for i in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder = its.BlendedMegatronDatasetBuilder(its.GPTDataset, sizes, lambda: True, config)
        return builder.build()[split_index]


def text(dataset: Any, index: int) -> np.ndarray:
    """The inputs of a sample and its last label, (S + 1,)."""
    sample = dataset[index]
    return np.append(sample["tokens"].numpy(), sample["labels"].numpy()[-1])


def masks_and_positions(
    tokens: torch.Tensor, eod: int, given: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return its masks of one row (S): hidden (1, S, S) bool, counted (S) 0 or 1, positions (S)."""
    flags = (name in given for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"))
    return core()._get_ltor_masks_and_position_ids(tokens, eod, *flags, True)
