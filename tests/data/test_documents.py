"""Document masks compared with those of megatron-core for the same tokens."""

import itertools
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from megatron_zpp.config.data import MASKS, DataConfig
from megatron_zpp.data.documents import masked_samples
from megatron_zpp.model.attention import DotProduct
from tests.data.conftest import open_data
from tests.data.megatron_core import masks_and_positions

EOD = 3
TEXTS = {
    "several in a row": [[1, 3, 3, 3, 2, 2, 3, 1, 1], [3, 3, 1, 3, 3, 3, 3, 3, 3]],
    "one row": [[1, 3, 2, 3, 2, 2, 3, 1, 1]],
    "none": [[1, 2, 1, 2, 1, 2, 1, 2, 1]],
    "nothing else": [[3] * 9] * 5,  # more documents than there is room for at first
    "at the edges": [[3, 1, 1, 1, 1, 1, 1, 1, 3], [1, 1, 1, 1, 1, 1, 1, 3, 1]],
    "random": np.random.default_rng(1).integers(0, 5, (6, 9)).tolist(),
}


@dataclass(frozen=True)
class Rows:
    """Return a source of these samples."""

    rows: list[list[int]]

    def batch(self, indices):
        return np.array(self.rows)[np.asarray(indices) % len(self.rows)]


def config_of(*given, **more):
    return DataConfig(
        **({} if "data_path" in more else {"mock_data": True}), **dict.fromkeys(given, True), **more
    )


def batch_of(rows, *given):
    return masked_samples(Rows(rows), config_of(*given), EOD).batch(np.arange(len(rows)))


@pytest.mark.parametrize("rows", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(
    "given", [given for count in (1, 2, 3) for given in itertools.combinations(MASKS, count)], ids="+".join
)
def test_masks_are_megatron_cores(rows, given):
    batch = batch_of(rows, *given)
    tokens = torch.tensor(rows)[:, :-1]
    expected = [masks_and_positions(row, EOD, given) for row in tokens]  # (hidden, counted, positions) a row
    assert batch.tokens.tolist() == tokens.tolist()
    targets = torch.tensor(rows)[:, 1:]
    counted = torch.stack([row[1] for row in expected]).bool()
    assert batch.targets.tolist() == targets.masked_fill(~counted, -100).tolist()
    if "reset_position_ids" in given:
        assert batch.positions.tolist() == [row[2].tolist() for row in expected]
    else:
        assert batch.positions is None
    if "reset_attention_mask" in given:
        ends = torch.from_numpy(batch.documents)
        mask = DotProduct().mask(torch.empty(*tokens.shape, 1), None, ends).bounds
        assert torch.equal(mask == 0, ~torch.stack([row[0] for row in expected]))
    else:
        assert batch.documents is None


def test_documents_have_few_sizes_whatever_the_text():
    """Kernels are compiled twice for each size, and torch.compile fails at its ninth graph."""
    sizes = {}
    for share in (0, 0.2, 0.5, *range(1, 4), *range(5, 101, 5)):
        rows = np.where(np.arange(8192) % 1000 < 10 * share, EOD, 1)[None].repeat(4, axis=0).tolist()
        documents = batch_of(rows, "reset_attention_mask").documents
        assert documents.dtype == np.int32
        assert documents[0] == 0
        assert documents[-1] == 4 * 8191
        assert (np.diff(documents) >= 0).all()
        sizes.setdefault(len(documents), share)
    assert 2 * len(sizes) <= 8
    usual = [np.where(np.arange(1024) % 256 == where, EOD, 1).tolist() for where in (0, 50, 100, 255)]
    assert len(batch_of(usual, "reset_attention_mask").documents) == min(sizes)


def test_opening_data_masks_it_and_needs_ends_of_documents(by_hand):
    described = {"eod": EOD, "tokenizer_type": "x", "vocab_size": 5, "fingerprint": "x"}
    with_ends = by_hand("a", [[1, 2, EOD]] * 20)
    without = by_hand("b", [[1, 2, 4]] * 20)

    def opened(prefix, **given):
        config = config_of(data_path=(prefix,), split="80,20,0", **given)
        return open_data(config, seq_length=4, vocab_size=5, tokenizer_description=described)

    splits = opened(with_ends, reset_position_ids=True, eod_mask_loss=True)
    plain = opened(with_ends).train.batch(np.arange(9))
    masked = ForkingPickler.loads(ForkingPickler.dumps(splits.train)).batch(np.arange(9))
    assert (masked.targets == np.where(plain[:, :-1] == EOD, -100, plain[:, 1:])).all()
    assert masked.positions.max() == 2
    said = "samples of 4; after token 3: positions restart, no loss of the next token"
    assert splits.train.describe().endswith(said)
    assert splits.train.windows_per_epoch == opened(with_ends).train.windows_per_epoch
    said = r"^--reset-attention-mask \(given\): .*b.bin has no end of document"
    with pytest.raises(ValueError, match=said):
        opened(without, reset_attention_mask=True)
