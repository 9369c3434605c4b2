"""--dataset-order megatron against megatron-core itself, on random data, splits, blends and lengths."""

import math
import re

import numpy as np
import pytest

from megatron_zpp.config.data import DataConfig, split_shares
from megatron_zpp.data.blend import BlendedDataset
from megatron_zpp.data.megatron.blend import blend_order, exhaustive_order
from megatron_zpp.data.megatron.dataset import MegatronDataset, normalized
from megatron_zpp.data.megatron.order import sample_index
from tests.data import megatron_core
from tests.data.conftest import open_data

SPLITS = ("train", "valid", "test")


def write_random(by_hand, random, name):
    """A data set of 3 to 60 sequences, some of them empty, whose tokens differ from their neighbours'."""
    lengths = random.integers(0, random.choice([4, 40, 200]), random.integers(3, 60)).tolist()
    return by_hand(name, [random.integers(0, 1000, length).tolist() for length in (*lengths, 5)])


def with_weights(random, paths):
    weights = random.choice([1, 2, 0.3, 0.25, 7, 1e-2, random.random()], len(paths))
    return [part for weight, path in zip(weights, paths, strict=True) for part in (str(weight), path)]


def assert_same(ours, theirs, count):
    """Every index of every data set, and the samples themselves."""
    if isinstance(ours, BlendedDataset):
        assert len(theirs) == len(theirs.dataset_index)
        np.testing.assert_array_equal(ours.blend.indexes["dataset_index"], theirs.dataset_index)
        np.testing.assert_array_equal(ours.blend.indexes["dataset_sample_index"], theirs.dataset_sample_index)
        assert len(ours.sources) == len(theirs.datasets)
    pairs = (
        [(ours, theirs)]
        if isinstance(ours, MegatronDataset)
        else zip(ours.sources, theirs.datasets, strict=True)
    )
    for source, reference in pairs:
        for name in ("document_index", "sample_index", "shuffle_index"):
            mine, its = source.indexes[name], getattr(reference, name)
            np.testing.assert_array_equal(mine, its)
            assert mine.dtype == its.dtype
    numbers = np.arange(min(len(theirs), count))
    batch = ours.batch(numbers)
    assert batch.tolist() == [megatron_core.text(theirs, int(number)).tolist() for number in numbers]


def flags_of(random, paths):
    """Return (our flags, their flags): paths with or without weights, split or one list per split."""
    entries = with_weights(random, paths) if random.random() < 0.6 else list(paths)
    if random.random() < 0.7:
        split = str(random.choice(["969,30,1", "80,15,5", "1,1,1", "0.6,0.4", "50,30,20"]))
        return {"data_path": tuple(entries), "split": split}, {"blend": entries, "split": split}
    own = {f"{split}_data_path": tuple(entries) for split in SPLITS[: random.integers(1, 4)]}
    return own, {"blends": [own.get(f"{split}_data_path", ()) for split in SPLITS]}


@pytest.mark.parametrize("case", range(24))
def test_same_samples_as_megatron_core(case, by_hand, tmp_path):
    random = np.random.default_rng(case)
    paths = [write_random(by_hand, random, f"set{number}") for number in range(random.integers(1, 5))]
    ours, theirs = flags_of(random, paths)
    seq_length, seed = int(random.integers(2, 40)), int(random.integers(0, 2**32))
    requested = {
        split: int(random.integers(1, most)) for split, most in zip(SPLITS, (400, 60, 20), strict=True)
    }
    if random.random() < 0.2:
        requested["valid"] = None  # --full-validation
    config = DataConfig(**ours, dataset_order="megatron", data_cache_path=str(tmp_path / "cache"))
    for number, split in enumerate(SPLITS):
        there = config.shares[number] if config.data_path else getattr(config, f"{split}_data_path")
        if not there:
            continue

        def reference(number=number, split=split):
            return megatron_core.build(number, requested[split], seq_length=seq_length, seed=seed, **theirs)

        try:
            mine = open_data(config, needed=(split,), requested=requested, seq_length=seq_length, seed=seed)
        except ValueError as option_error:
            assert_cannot(str(option_error), reference, requested[split])
        else:
            assert_same(getattr(mine, split), reference(), 50)


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("1", (1, 0, 0)),
        ("8,1,1", (0.8, 0.1, 0.1)),
        ("0,3", (0, 1, 0)),
        (" 98 , 2 , 0 ", (0.98, 0.02, 0)),
        ("'99,1,0'", (0.99, 0.01, 0)),
        ("949/50/1", (0.949, 0.05, 0.001)),
        ("98 2 0", (0.98, 0.02, 0)),
        ("[.9, .1]", (0.9, 0.1, 0)),
    ],
)
def test_shares_are_those_of_megatron(text, shares):
    megatron_core.core()  # without its warnings
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

    assert parse_and_normalize_split(text) == pytest.approx(shares)
    assert all(math.isclose(a, b) for a, b in zip(split_shares(text), shares, strict=True))


def assert_same_blend(weights, size):
    expected = np.zeros(size, np.int16), np.zeros(size, np.int64)
    megatron_core.core().helpers.build_blending_indices(*expected, weights, len(weights), size, False)
    for mine, its in zip(blend_order(weights, size), expected, strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("case", range(12))
def test_long_blends_of_any_weights_are_the_same(case):
    """Weights that are random, equal, round or far apart; and more sets than fit in a byte."""
    random = np.random.default_rng(case)
    sets = 260 if case == 11 else int(random.integers(2, 20))
    kinds = random.random(sets), np.ones(sets), random.integers(1, 9, sets), 10 ** random.uniform(-5, 0, sets)
    weights, size = normalized(kinds[case % 4].astype(np.float64)), int(random.integers(1, 10_000))
    assert_same_blend(weights, size)
    sizes = random.integers(1, 4 if case % 2 else 500, sets)
    expected = np.zeros(sizes.sum(), np.int16), np.zeros(sizes.sum(), np.int64)
    megatron_core.core().helpers.build_exhaustive_blending_indices(*expected, sizes, sets)
    for mine, its in zip(exhaustive_order(sizes), expected, strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("weights", [[1 / 3, 1 / 3, 1 / 3], [1e-6, 0.1, 0.2, 0.3, 0.7]])
def test_blends_of_several_pieces(weights):
    """Including ties at every step."""
    assert_same_blend(normalized(np.array(weights)), (1 << 22) + 70_001)


@pytest.mark.parametrize(("longest", "seq_length"), [(1, 3), (30, 700), (3000, 7), (40_000, 64)])
def test_sample_indexes_of_many_documents(longest, seq_length):
    """Many pieces; empty documents; samples of many documents and documents of many samples."""
    random = np.random.default_rng(longest)
    lengths = random.integers(0, longest + 1, 3_000_000 // longest, np.int32)
    documents = random.permutation(np.repeat(np.arange(len(lengths), dtype=np.int32), 2))
    tokens = int(lengths.sum())
    expected = megatron_core.core().helpers.build_sample_idx(
        lengths, documents, seq_length, 2, tokens, True, 1
    )
    mine = sample_index(lengths, documents, seq_length)
    np.testing.assert_array_equal(mine, expected)
    assert mine.dtype == expected.dtype


def assert_cannot(message, reference, requested):
    """Settings that are errors here fail in Megatron-LM too, give too few samples, or never return."""
    if re.search(r" has (0 of its|[01] \()", message):  # tokens, of which it would never have enough
        return
    try:
        dataset = reference()
    except (AssertionError, IndexError, TypeError):
        return
    assert len(dataset) < (requested or 1), message
