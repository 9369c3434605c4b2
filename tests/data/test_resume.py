"""A run that resumes with other weights or data sets continues each data set where it was."""

import hashlib
import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.config.data import DataConfig
from megatron_zpp.data.dataset_progress import DatasetProgress
from megatron_zpp.data.open import seed_of
from megatron_zpp.data.resume import resume_data
from megatron_zpp.data.text.samples import TextDataset
from megatron_zpp.data.windows import order_seed
from megatron_zpp.tokenizer import build_tokenizer, describe
from tests.data.conftest import open_data
from tests.data.format_by_hand import write_by_hand
from tests.data.text.conftest import NULL, json_lines
from tests.data.text.conftest import opened as opened_text

SEQ_LENGTH, SEED = 4, 7
SETS, TEXTS = "abcde", "de"
TELLS = 10_000  # tokens for each set, so that one says which it is of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data sets a to c with 11, 12 and 13 windows, text d with several groups and text e with one.

    A token says which set it is of, and where.
    """
    folder = tmp_path_factory.mktemp("sets")
    for number, name in enumerate("abc"):
        tokens = TELLS * number + np.arange(4 * (11 + number))
        write_by_hand(folder / name, [tokens.tolist()])
    for number, name, tokens in ((3, "d", 1600), (4, "e", 120)):
        documents = np.split(TELLS * number + np.arange(tokens), np.arange(7, tokens, 7))
        (folder / f"{name}.jsonl").write_bytes(json_lines([part.tolist() for part in documents]))
    return folder


@pytest.fixture(autouse=True)
def _texts_are_opened_once(monkeypatch):
    monkeypatch.setattr("megatron_zpp.data.text.open.open_text", lambda flag, path, **_: text_of(path))


@cache
def text_of(path):
    """With groups of four blocks, fewer than in a run."""
    text = opened_text(path)
    text.source.group = 4
    return text


def path_of(folder, name):
    return f"{folder}/{name}{'.jsonl' if name in TEXTS else ''}"


def opened(folder, parts, order="windows", requested=40):
    entries = tuple(
        entry
        for weight, name in parts
        for entry in (*([] if weight is None else [str(weight)]), path_of(folder, name))
    )
    cache = str(folder / "cache") if order == "megatron" else None
    data = DataConfig(train_data_path=entries, dataset_order=order, data_cache_path=cache)
    splits = open_data(
        data,
        seq_length=SEQ_LENGTH,
        vocab_size=70_000,
        seed=SEED,
        requested={"train": requested},
        tokenizer=NULL,
        tokenizer_description=describe(build_tokenizer(NULL)),
    )
    return splits.train, data


def resumed(folder, parts, saved, consumed, **options):
    samples, data = opened(folder, parts, **options)
    kept = saved and DatasetProgress.from_json(json.loads(json.dumps(asdict(saved))))
    return resume_data(samples, kept, consumed=consumed, data=data, train_seed=seed_of("train", SEED))


def order_of(folder, name, stream, count):
    """Return the first samples of a single data set in the order of a stream."""
    seed = order_seed(seed_of("train", SEED), stream)
    if name in TEXTS:
        text = text_of(path_of(folder, name))
        alone = TextDataset("train", text, (0, text.source.blocks), SEQ_LENGTH, seed, 1)
    else:
        alone = replace(opened(folder, [(1.0, name)])[0], seed=seed)
    return alone.batch(np.arange(count)).tolist()


blends = st.lists(st.sampled_from(SETS), min_size=1, max_size=4, unique=True).flatmap(
    lambda names: st.tuples(
        *(st.tuples(st.sampled_from([0.1, 0.25, 1.0, 3.0, 7.5]), st.just(n)) for n in names)
    )
)


@settings(max_examples=40)
@given(st.lists(st.tuples(blends, st.integers(1, 60)), min_size=2, max_size=6))
def test_no_sample_of_any_set_is_lost_or_repeated(folder, stages):
    """After any changes, including omitted and reused sets, the samples read from a set are its sequence."""
    consumed, dataset_progress = 0, None
    read: dict[str, list] = {name: [] for name in SETS}
    streams: dict[str, int] = {}
    for parts, samples in stages:
        on = resumed(folder, parts, dataset_progress, consumed)
        rows = on.samples.batch(np.arange(consumed, consumed + samples)).tolist()
        middle = on.samples.batch(np.arange(consumed + samples // 2, consumed + samples)).tolist()
        assert middle == rows[samples // 2 :]  # any rank may begin anywhere
        for row in rows:
            read[SETS[row[0] // TELLS]].append(row)
        taken = [sum(row[0] // TELLS == SETS.index(name) for row in rows) for _, name in parts]
        total = sum(weight for weight, _ in parts)
        for count, (weight, _) in zip(taken, parts, strict=True):
            assert abs(count - samples * weight / total) <= 2.01  # twice the bound of four sets
        dataset_progress, consumed = on.dataset_progress, consumed + samples
        for part in dataset_progress.sets:
            name = Path(part.prefix).stem
            assert streams.setdefault(name, part.stream) == part.stream
    assert len(set(streams.values())) == len(streams)  # two sets of one content have no common order
    for name, rows in read.items():
        assert rows == (order_of(folder, name, streams[name], len(rows)) if rows else [])
    for part, count in zip(dataset_progress.sets, dataset_progress.consumed_by(consumed), strict=True):
        assert count == len(read[Path(part.prefix).stem])


@pytest.mark.parametrize(
    "parts",
    [
        [(0.3, "a"), (0.7, "b")],
        [(None, "a"), (None, "b")],
        [(5.0, "a")],
        [(0.3, "a"), (0.7, "d")],
        [(None, "d"), (None, "e")],
        [(None, "d")],
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_no_sample_moves_without_a_change(folder, parts, known):
    first = resumed(folder, parts, None, 0)
    saved = (
        first.dataset_progress if known else DatasetProgress.from_settings(asdict(opened(folder, parts)[1]))
    )
    on = resumed(folder, parts, saved, 17)
    assert on.lines == []
    assert on.dataset_progress == first.dataset_progress or not known
    numbers = np.arange(17, 80)
    assert on.samples.batch(numbers).tolist() == first.samples.batch(numbers).tolist()
    later = resumed(folder, parts, on.dataset_progress, 40)
    assert later.samples.batch(numbers).tolist() == first.samples.batch(numbers).tolist()


def test_a_checkpoint_without_progress_had_its_weights_from_the_start(folder):
    """As from earlier versions: recognised by its settings, even if a data set was moved."""
    before = DataConfig(train_data_path=("0.25", "/elsewhere/b", "0.75", str(folder / "a")))
    on = resumed(folder, [(1, "a"), (1, "b")], DatasetProgress.from_settings(asdict(before)), 20)
    given = {Path(part.prefix).name: part.consumed_before for part in on.dataset_progress.sets}
    assert given == {"a": 15, "b": 5}
    assert {Path(part.prefix).name: part.stream for part in on.dataset_progress.sets} == {"a": 1, "b": 0}


def test_lines_about_a_changed_blend(folder):
    first = resumed(folder, [(0.5, "a"), (0.5, "b")], None, 0)
    on = resumed(folder, [(0.6, "a"), (0.4, "c")], first.dataset_progress, 30)
    assert on.lines == [
        " the blend changes at sample 30; each data set continues from where it was:",
        f"   50.00% -> 60.00% {folder}/a, from its sample 15 on",
        f"   0.00% -> 40.00% {folder}/c, from its beginning",
        f"   50.00% -> 0 {folder}/b, omitted after 15 samples",
    ]
    assert [(part.name, part.times, part.about) for part in on.samples.epochs(50)] == [
        (f"{folder}/a", (15 + 12) / 11, False),
        (f"{folder}/c", 8 / 13, False),
    ]
    unchanged = resumed(folder, [(0.6, "a"), (0.4, "c")], on.dataset_progress, 40)
    assert unchanged.dataset_progress == on.dataset_progress
    back = resumed(folder, [(1, "b")], unchanged.dataset_progress, 50)  # it was remembered
    assert f"   0.00% -> 100.00% {folder}/b, from its sample 15 on" in back.lines


def fixed_lengths(path, first):
    """Write 20 documents of 4 tokens, which begin with `first`: any two such sets have the same lengths."""
    write_by_hand(path, (np.arange(80) + first).reshape(20, 4).tolist())


def test_another_data_set_of_the_same_lengths_starts_at_its_beginning(tmp_path):
    fixed_lengths(tmp_path / "one", 0)
    fixed_lengths(tmp_path / "two", 1000)
    first = resumed(tmp_path, [(1, "one")], None, 0)
    on = resumed(tmp_path, [(1, "two")], first.dataset_progress, 7)
    assert on.lines[1] == f"   0.00% -> 100.00% {tmp_path}/two, from its beginning"
    (tmp_path / "one.bin").rename(tmp_path / "moved.bin")
    (tmp_path / "one.idx").rename(tmp_path / "moved.idx")
    back = resumed(tmp_path, [(1, "two"), (1, "moved")], on.dataset_progress, 12)
    assert [part.consumed_before for part in back.dataset_progress.sets] == [5, 7]


@pytest.mark.parametrize("order", ["windows", "megatron"])
def test_a_checkpoint_of_version_0_1_continues(tmp_path, order):
    """Its fingerprints do not depend on tokens: the same name decides between data sets of equal lengths."""
    for name, token in (("one", 0), ("two", 1000)):
        fixed_lengths(tmp_path / name, token)
    parts = [(0.5, "two"), (0.5, "one")]
    first = resumed(tmp_path, parts, None, 0, order=order)
    dtype, lengths = np.dtype("<u2"), np.full(20, 4, "<i4").tobytes()
    digest = hashlib.sha256(f"20 80 {dtype}".encode() + lengths + lengths).hexdigest()[:32]
    sets = tuple(replace(part, fingerprint=digest) for part in first.dataset_progress.sets)
    on = resumed(tmp_path, parts, replace(first.dataset_progress, sets=sets), 10, order=order)
    assert (on.lines, on.dataset_progress) == ([], first.dataset_progress)
    if order == "windows":
        on = resumed(tmp_path, [(1, "one")], replace(first.dataset_progress, sets=sets), 10)
        (part,) = on.dataset_progress.reading
        assert (part.prefix, part.stream, part.consumed_before) == (f"{tmp_path}/one", 1, 5)


def test_one_data_set_given_twice_is_two(folder):
    first = resumed(folder, [(0.5, "a"), (0.5, "a")], None, 0)
    on = resumed(folder, [(0.2, "a"), (0.8, "a")], first.dataset_progress, 10)
    assert [part.stream for part in on.dataset_progress.sets] == [0, 1]
    assert [part.consumed_before for part in on.dataset_progress.sets] == [5, 5]


def test_a_changed_blend_in_megatrons_order_is_an_error(folder):
    parts, other = [(0.3, "a"), (0.7, "b")], [(0.4, "a"), (0.6, "b")]
    first = resumed(folder, parts, None, 0, order="megatron")
    on = resumed(folder, parts, first.dataset_progress, 10, order="megatron")
    assert (on.lines, on.dataset_progress) == ([], first.dataset_progress)
    message = rf"^--train-data-path 0.4 {folder}/a 0.6 {folder}/b: the run began with 0.3 {folder}/a 0.7 "
    with pytest.raises(ValueError, match=message):
        resumed(folder, other, first.dataset_progress, 10, order="megatron")
    older = DatasetProgress.from_settings(asdict(opened(folder, parts, order="megatron")[1]))
    assert resumed(folder, parts, older, 10, order="megatron").lines == []
    with pytest.raises(ValueError, match=message):
        resumed(folder, other, older, 10, order="megatron")


@pytest.mark.parametrize(
    "harm",
    [
        {"since": 1.5},
        {"order": None},
        {"sets": []},
        {"sets": [{"prefix": "a"}]},
        {"sets": [{"weight": 0.0}, {"weight": 1.0}]},
        {"sets": [{"weight": float("nan")}]},
        {"sets": [{"weight": 1.0, "consumed_before": -1}]},
    ],
)
def test_an_invalid_record_of_progress_is_an_error(folder, harm):
    value = json.loads(json.dumps(asdict(resumed(folder, [(1, "a")], None, 0).dataset_progress)))
    whole = {"prefix": "a", "fingerprint": "", "stream": 0, "consumed_before": 0}
    sets = [whole | each if "weight" in each else each for each in harm.get("sets", value["sets"])]
    with pytest.raises((ValueError, KeyError, TypeError)):
        DatasetProgress.from_json(value | harm | {"sets": sets})
