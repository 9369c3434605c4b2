"""Windows of the ring compared with plain Python, and tokens outside the vocabulary."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.windows import WindowDataset, WindowOrder
from tests.data.format_by_hand import write_by_hand
from tests.support import refusal


@settings(max_examples=150)
@given(st.integers(1, 50), st.integers(0, 400), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_an_epoch_reads_each_token_once(seq_length, more, seed, epoch):
    tokens = seq_length + 1 + more
    order = WindowOrder(tokens, seq_length, seed)
    count = tokens // seq_length
    assert order.windows_per_epoch == count
    starts = order.starts(np.arange(epoch * count, (epoch + 1) * count)).tolist()
    read = [(start + step) % tokens for start in starts for step in range(seq_length)]
    assert len(set(read)) == len(read) == count * seq_length
    # One ring of windows end to end: each begins where another one ended, all but at the gap.
    ends = {(start + seq_length) % tokens for start in starts}
    assert len(set(starts) - ends) <= 1


def test_large_numbers_and_large_data_sets():
    starts = WindowOrder(2**45, 2048, 1).starts(np.array([0, 2**40, 2**50, 2**60]))
    assert starts.min() >= 0
    assert starts.max() < 2**45
    assert len(set(starts.tolist())) == 4


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(0, 30), st.integers(0, 9), st.integers(0, 7))
def test_batches_against_plain_python(tmp_path_factory, seq_length, more, before, after):
    prefix = tmp_path_factory.mktemp("windows") / "x"
    tokens = list(range(100, 100 + before + seq_length + 1 + more + after))
    write_by_hand(prefix, [tokens])
    last = len(tokens) - after
    data = WindowDataset(IndexedDataset(prefix), before, last, seq_length, 1000, seed=3)
    ring = tokens[before:last]
    batch = data.batch(np.arange(3 * data.windows_per_epoch))
    assert batch.dtype == np.int64
    for row, start in zip(batch.tolist(), data.order.starts(np.arange(len(batch))).tolist(), strict=True):
        assert row == [ring[(start + step) % len(ring)] for step in range(seq_length + 1)]


@pytest.mark.parametrize(("kind", "bad"), [("H", 101), ("i", -1), ("q", 2**40)])
def test_token_outside_the_vocabulary_is_named_with_its_position(by_hand, kind, bad):
    tokens = [*range(90), bad, *range(9)]
    prefix = by_hand("x", [tokens], kind=kind)
    data = WindowDataset(IndexedDataset(prefix), 50, 100, 7, 101, seed=0)
    said = refusal(data.batch, np.arange(data.windows_per_epoch * 2))
    size = {"H": 2, "i": 4, "q": 8}[kind]
    assert said.startswith(
        f"{prefix}.bin: byte {90 * size}: token 90 is {bad}, outside the vocabulary of 101"
    )
