"""What the model is told of the documents of a sample, as Megatron-LM's document masks tell it.

A document ends with its end of document, which belongs to it; a window that begins inside a document begins
as one. B samples of S + 1 tokens give B rows of S inputs and targets. All of it is computed where samples are
read, ahead of the step.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_zpp.config.data import MASKS, DataConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.data.indexed import IndexedDataset, tokens_path
from megatron_zpp.data.samples import Epochs, Samples

NOT_COUNTED = -100  # the target that cross_entropy leaves out
# Documents a row, the first that are enough; else as many as tokens. Each size may be compiled for, with
# gradients and without, and torch.compile gives up after eight graphs.
_ROOMS = (8, 32, 128)
_LOOKED_AT = 1 << 20  # tokens of a data set: few documents are longer


class ModelInputs(NamedTuple):
    """A micro-batch as the arguments of the model, in their order.

    tokens (B, S) int64; targets (B, S) int64, of which NOT_COUNTED have no loss; positions (B, S) int64, or
    None where they go from 0 to S - 1; documents (E) int32, or None where each row is one: the place of each
    one's first token among the B · S tokens, then B · S to the end, as if empty documents followed.
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray | None
    documents: np.ndarray | None


@dataclass(frozen=True)
class MaskedSamples:
    """Samples whose documents are told apart, after each token `eod`."""

    samples: Samples
    eod: int
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool

    @property
    def windows_per_epoch(self) -> int | None:
        """Samples that are read before text repeats; None when it never does."""
        return self.samples.windows_per_epoch

    def epochs(self, samples: int) -> list[Epochs]:
        """How often the first so many samples read each data set."""
        return self.samples.epochs(samples)

    def describe(self) -> str:
        """One line for the head of a run."""
        told = {
            "positions restart": self.reset_position_ids,
            "attention restarts": self.reset_attention_mask,
            "no loss of the next token": self.eod_mask_loss,
        }
        masks = ", ".join(name for name, given in told.items() if given)
        return f"{self.samples.describe()}; after token {self.eod}: {masks}"

    def batch(self, indices: np.ndarray) -> ModelInputs:
        """Samples by number: (len,) integers of 0 or more."""
        batch = self.samples.batch(indices)  # (B, S + 1)
        tokens, targets = batch[:, :-1].copy(), batch[:, 1:].copy()  # of one row both would be views
        ends = tokens == self.eod
        if self.eod_mask_loss:
            targets[ends] = NOT_COUNTED
        begins = np.ones_like(ends)
        begins[:, 1:] = ends[:, :-1]
        return ModelInputs(
            tokens,
            targets,
            _positions(begins) if self.reset_position_ids else None,
            _documents(begins) if self.reset_attention_mask else None,
        )


def masked_samples(samples: Samples, config: DataConfig, eod: int) -> Samples:
    """`samples` with the masks of --reset-position-ids, --reset-attention-mask and --eod-mask-loss."""
    if not config.masks:
        return samples
    return MaskedSamples(samples, eod, **{name: name in config.masks for name in MASKS})


def check_ends(data: IndexedDataset, masks: tuple[str, ...], eod: int) -> None:
    """Raises ValueError where masks would do nothing, as the data has no ends of documents."""
    if masks and not ((data.tokens[:_LOOKED_AT] == eod).any() or data.tokens[-1] == eod):
        fix = (
            f"{tokens_path(data.prefix)} has no end of document (token {eod}) in its first {_LOOKED_AT:,} "
            "tokens; preprocess it again with --append-eod, or leave the flag out"
        )
        raise option_error("--" + masks[0].replace("_", "-"), "(given)", fix)


def as_tensors(batch: np.ndarray | ModelInputs) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """What a source of samples gave, as the engine takes it; memory is shared."""
    if isinstance(batch, np.ndarray):
        return torch.from_numpy(batch)
    return tuple(None if part is None else torch.from_numpy(part) for part in batch)


def _positions(begins: np.ndarray) -> np.ndarray:
    """(B, S): how far each token is from where its document begins."""
    columns = np.arange(begins.shape[1])
    return columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)


def _documents(begins: np.ndarray) -> np.ndarray:
    """ModelInputs.documents. E is one of a few sizes, whatever the text."""
    starts = np.flatnonzero(begins)
    room = next((room for room in _ROOMS if room * len(begins) >= len(starts)), begins.shape[1])
    documents = np.full(room * len(begins) + 1, begins.size, np.int32)
    documents[: len(starts)] = starts
    return documents
