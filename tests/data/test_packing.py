"""Best-fit packing against a search by hand, its samples against the documents, and what resumes."""

from collections import Counter
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.config.data import DataConfig
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.open import seed_of
from megatron_zpp.data.packing import best_fit, cut_documents
from megatron_zpp.data.resume import resume_data
from tests.data.conftest import open_data
from tests.data.format_by_hand import write_by_hand

OURS = {"tokenizer_type": "NullTokenizer", "vocab_size": 1000, "eod": 999, "fingerprint": "a"}


def opened(config, **more):
    return open_data(config, **{"tokenizer_description": OURS} | more)


def packed(path, **more):
    return DataConfig(train_data_path=path, dataset_packing="best-fit", **more)


def fullest_first(lengths, size):
    """Return the rooms of best-fit decreasing, one item after another."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if not fitting:
            fitting = [len(rooms)]
            rooms.append(size)
        number = min(fitting, key=lambda number: (rooms[number], number))
        rooms[number] -= length
    return rooms


@settings(max_examples=300)
@given(st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size)))))
def test_bins_are_those_of_a_search_item_by_item(case):
    size, lengths = case
    bins = best_fit(np.array(lengths, np.int64), size)
    rooms = fullest_first(lengths, size)
    filled = np.bincount(bins, weights=lengths, minlength=len(rooms))
    assert sorted(size - filled) == sorted(rooms)  # which of equally full bins is taken changes no room


def test_packing_is_fast_and_leaves_little_room():
    lengths = np.random.default_rng(0).lognormal(6, 1.3, 300_000).astype(np.int64).clip(1, 70_000)
    bins = best_fit(lengths, 70_000)
    filled = np.bincount(bins, weights=lengths)
    assert filled.min() > 0
    assert filled.max() <= 70_000
    assert len(filled) == -(-lengths.sum() // 70_000)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 9))
def test_pieces_make_each_prediction_of_a_document_once(documents, seq_length):
    bounds = np.concatenate([[7], 7 + np.cumsum(documents)])
    starts, lengths = cut_documents(bounds, seq_length)
    inputs = [start + step for start, length in zip(starts, lengths, strict=True) for step in range(length)]
    assert inputs == [at for a, b in pairwise(bounds) for at in range(a, b - 1)]
    assert all(0 < length <= seq_length for length in lengths)
    shorter = sum(0 < length < seq_length for length in lengths)
    assert shorter <= sum(size > 1 for size in documents)


def rows_of(inputs):
    """Return the documents of each row as [(inputs, targets)], the padding as None."""
    tokens, targets, positions, ends = inputs
    width = tokens.shape[1]
    begins = ends[ends < tokens.size].tolist()
    rows = [[] for _ in tokens]
    for first, last in zip(begins, [*begins[1:], tokens.size], strict=True):
        row, at = divmod(first, width)
        inside = slice(at, at + last - first)
        assert positions[row, inside].tolist() == list(range(last - first))
        kept = (tokens[row, inside].tolist(), targets[row, inside].tolist())
        assert set(kept[1]) == {-100} or -100 not in kept[1]
        rows[row].append(None if -100 in kept[1] else kept)
    return rows


@pytest.mark.parametrize("grouped", [False, True])
def test_an_epoch_reads_each_document_once_and_the_next_in_another_order(tmp_path, grouped):
    sizes = np.random.default_rng(1).integers(1, 25, 60).tolist()
    texts = [[100 + number] * (size - 1) + [999] for number, size in enumerate(sizes)]
    whole = texts
    if grouped:  # a document is several sequences, as Megatron-LM's sentences
        whole = [texts[n] + texts[n + 1] for n in range(0, 60, 2)]
        write_by_hand(tmp_path / "x", texts, documents=[*range(0, 60, 2), 60])
    else:
        write_by_hand(tmp_path / "x", texts)
    samples = opened(packed((str(tmp_path / "x"),))).train
    count = samples.windows_per_epoch
    found = [rows_of(samples.batch(np.arange(e * count, (e + 1) * count))) for e in range(2)]
    pieces = Counter(
        (tuple(doc[at : at + 8]), tuple(doc[at + 1 : at + 9][: len(doc) - 1 - at]))
        for doc in whole
        for at in range(0, len(doc) - 1, 8)
    )
    pieces = Counter({(i[: len(t)], t): n for (i, t), n in pieces.items()})
    for rows in found:
        assert Counter((tuple(a), tuple(b)) for row in rows for a, b in filter(None, row)) == pieces
        assert all(None not in row[:-1] for row in rows)  # padding is at the end
    assert found[0] != found[1]
    assert sorted(map(str, found[0])) == sorted(map(str, found[1]))
    predictions = sum(len(doc) - 1 for doc in whole)
    cut = sum(len(doc) > 9 for doc in whole)
    share = 1 - predictions / (8 * count)
    assert samples.describe() == (
        f"{tmp_path}/x: {predictions:,} predictions of {len(whole)} documents, {cut} of them cut, packed "
        f"into {count} samples of 8 with {share:.2%} padding; in each document: positions restart, "
        "attention restarts"
    )
    (epochs,) = samples.epochs(count * 2)
    assert epochs.times == 2


@pytest.mark.parametrize("kind", ["windows", "megatron", "best-fit"])
def test_samples_of_a_million_tokens(tmp_path, kind):
    """A very long document and shorter ones; each target follows its input, and ranks resume anywhere."""
    length, sizes = 1 << 20, [(1 << 21) + 3, 700_000, 400_000, 20, 3]
    prefix = str(tmp_path / "x")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for size in sizes:
            tokens = np.arange(size) % 900
            tokens[-1] = 999
            writer.add_document(tokens)
    which = {"dataset_packing" if kind == "best-fit" else "dataset_order": kind}
    masks = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), True)
    config = DataConfig(train_data_path=(prefix,), **which, **masks)
    samples = opened(config, seq_length=length, requested={"train": 3}).train
    found = samples.batch(np.arange(3))
    inputs, targets = found.tokens, found.targets
    counted = targets != -100
    assert inputs.shape == targets.shape == (3, length)
    assert counted.mean() > 0.85
    assert (targets == np.where(inputs == 899, 0, inputs + 1))[counted & (targets != 999)].all()
    inside = counted & (found.positions > 0)
    assert (np.diff(found.positions)[inside[:, 1:]] == 1).all()
    begins = np.flatnonzero(found.positions == 0)
    assert set(found.documents[: len(begins)]) == set(begins)
    with MicroBatches(samples, BatchSchedule(1, 1, 1), rank=0, consumed=2, end=3, num_workers=0) as batches:
        ((tokens, *_),) = batches
    assert (tokens.numpy() == inputs[2:]).all()


def test_a_changed_blend_reads_on_in_each_data_set(tmp_path):
    for name, low in (("a", 1), ("b", 500)):
        write_by_hand(tmp_path / name, [[low + number % 400] * (number % 13 + 2) for number in range(80)])
    config = packed(("0.3", str(tmp_path / "a"), "0.7", str(tmp_path / "b")), eod_mask_loss=True)
    samples = opened(config, vocab_size=2000).train
    tokens = samples.batch(np.arange(96)).tokens
    assert 0.2 < np.mean([(row < 500).all() for row in tokens]) < 0.4
    seed, alone = seed_of("train", 1), packed((str(tmp_path / "b"),))
    saved = resume_data(samples, None, consumed=0, data=config, train_seed=seed).dataset_progress
    others = opened(alone, vocab_size=2000).train
    on = resume_data(others, saved, consumed=96, data=alone, train_seed=seed)
    read_before = saved.consumed_by(96)[1]
    assert asdict(on.dataset_progress)["sets"][0]["consumed_before"] == read_before
    expected = samples.samples.sources[1].batch(read_before + np.arange(3))[:, 0]
    assert (on.samples.batch(np.arange(96, 99)).tokens == expected).all()


def test_the_index_is_cached_once_for_all_seeds(tmp_path, by_hand):
    prefix, lines = by_hand("x", [[1, 2, 3]] * 20), []
    first = opened(packed((prefix,)), say=lines.append).train
    other = opened(packed((prefix,)), seed=2, say=lines.append).train
    assert len(lines) == 1
    assert lines[0].startswith(f"building the train packing of {prefix}, once; {prefix}.orders/")
    assert first.windows_per_epoch == other.windows_per_epoch == 5
    elsewhere = packed((prefix,), data_cache_path=str(tmp_path / "cache"))
    opened(elsewhere, seq_length=4, say=lines.append)
    assert str(tmp_path / "cache") in lines[1]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1]] * 9, "--dataset-packing best-fit: the train split of .*x has no document of two tokens"),
        ([[1]], "--seq-length 8: one sample needs 2 tokens, but the train split of .*x has 1 "),
        ([[1, 2], [3, 4, 1000, 5]], r"x.bin: byte 8: token 4 is 1000, outside the vocabulary of 1000"),
    ],
)
def test_what_cannot_be_packed_is_named(by_hand, texts, message):
    with pytest.raises(ValueError, match=message):
        opened(packed((by_hand("x", texts),)))
