"""Document masks: positions, attention and loss that keep the documents of a sample apart, as in Megatron-LM.

An end-of-document token belongs to the document that it ends. A window that begins inside a document is
treated as if it began one. Packed documents are told apart without such tokens, and the padding behind them
is a document without loss. B samples give B rows of S inputs and targets. Everything is computed by the
process that reads the samples, ahead of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_zpp.config.data import MASKS, DataConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.data.indexed import IndexedDataset, tokens_path
from megatron_zpp.data.samples import Epochs, Samples

NOT_COUNTED = -100  # the target that cross_entropy ignores
# Capacities in documents per row: the smallest sufficient one is used, or else the number of tokens, because
# kernels start blocks for empty documents too. Few, for compilers that make a graph for each size.
_CAPACITIES = (8, 32, 128)
_SEARCHED = 1 << 20  # tokens of a data set: few documents are longer


class ModelInputs(NamedTuple):
    """A micro-batch: the arguments of the model, in order.

    tokens      (B, S) int64
    targets     (B, S) int64; targets NOT_COUNTED have no loss
    positions   (B, S) int64, or None if every row counts from 0 to S - 1
    documents   (E,) int32, or None if each row is one document. The index of each document's first token
                among the B · S tokens, padded with B · S, as if empty documents followed
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray | None
    documents: np.ndarray | None


@dataclass(frozen=True)
class MaskedSamples(Samples):
    """Samples with `masks`, some of MASKS, that separate documents: after `eod`, or as they are packed."""

    samples: Samples  # if they are packed, of packing.PackedDataset
    eod: int
    packed: bool
    masks: tuple[str, ...]

    @property
    def windows_per_epoch(self) -> int | None:
        return self.samples.windows_per_epoch

    def epochs(self, samples: int) -> list[Epochs]:
        return self.samples.epochs(samples)

    def describe(self) -> str:
        effects = ("positions restart", "attention restarts", "no loss of the next token")
        masks = ", ".join(effect for name, effect in zip(MASKS, effects, strict=True) if name in self.masks)
        where = "in each document" if self.packed else f"after token {self.eod}"
        return f"{self.samples.describe()}; {where}: {masks}"

    def batch(self, indices: np.ndarray) -> ModelInputs:
        batch = self.samples.batch(indices)
        if self.packed:
            tokens, targets, begins = batch[:, 0].copy(), batch[:, 1].copy(), batch[:, 2] > 0  # of (B, 3, S)
        else:  # (B, S + 1); copies, because slices would be views if there is one row
            tokens, targets = batch[:, :-1].copy(), batch[:, 1:].copy()
            begins = np.ones(tokens.shape, bool)
            begins[:, 1:] = tokens[:, :-1] == self.eod
        if "eod_mask_loss" in self.masks:
            targets[tokens == self.eod] = NOT_COUNTED
        return ModelInputs(
            tokens,
            targets,
            _positions(begins) if "reset_position_ids" in self.masks else None,
            _documents(begins) if "reset_attention_mask" in self.masks else None,
        )


def masked_samples(samples: Samples, config: DataConfig, eod: int) -> Samples:
    """Add the masks of --reset-position-ids, --reset-attention-mask and --eod-mask-loss to `samples`."""
    return MaskedSamples(samples, eod, config.packs, config.masks) if config.masks else samples


def check_ends(data: IndexedDataset, masks: tuple[str, ...], eod: int) -> None:
    """Raise ValueError if masks would have no effect, because no document ends in the data."""
    if masks and not ((data.tokens[:_SEARCHED] == eod).any() or data.tokens[-1] == eod):
        fix = (
            f"{tokens_path(data.prefix)} has no end of document (token {eod}) in its first {_SEARCHED:,} "
            "tokens; preprocess it again with --append-eod, or omit the flag"
        )
        raise option_error("--" + masks[0].replace("_", "-"), "(given)", fix)


def as_tensors(batch: np.ndarray | ModelInputs) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """Return a batch as tensors, for the engine; memory is shared."""
    if isinstance(batch, np.ndarray):
        return torch.from_numpy(batch)
    return tuple(None if part is None else torch.from_numpy(part) for part in batch)


def counted_share(batch: torch.Tensor | Sequence[torch.Tensor | None], places: Sequence[range] = ()) -> float:
    """Return the share of a batch's targets that have a loss; the batch is on the CPU.

    With `places`, that of the targets there in each sample.
    """
    if isinstance(batch, torch.Tensor):
        return 1.0
    targets = batch[1]
    assert targets is not None, "see ModelInputs"
    parts = [targets[:, part.start : part.stop] for part in places] or [targets]
    return sum((part != NOT_COUNTED).sum().item() for part in parts) / sum(part.numel() for part in parts)


def _positions(begins: np.ndarray) -> np.ndarray:
    """Return the distance of each token from the beginning of its document, (B, S)."""
    columns = np.arange(begins.shape[1])
    return columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)


def _documents(begins: np.ndarray) -> np.ndarray:
    """Return ModelInputs.documents, padded to one of a few sizes, whatever the text."""
    starts = np.flatnonzero(begins)
    fitting = (capacity for capacity in _CAPACITIES if capacity * len(begins) >= len(starts))
    capacity = next(fitting, begins.shape[1])
    documents = np.full(capacity * len(begins) + 1, begins.size, np.int32)
    documents[: len(starts)] = starts
    return documents
