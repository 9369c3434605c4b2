"""The samples of a text: the same for all readers and starting points, each token once per epoch."""

import itertools
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_zpp.config.data import DataConfig
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.samples import Samples
from megatron_zpp.data.text.samples import TextDataset
from megatron_zpp.train.schedule.run_schedule import RunSchedule
from tests.data.format_by_hand import write_by_hand
from tests.data.text.conftest import NULL, NotingEncoder, json_lines, open_run, opened

S, GROUP = 8, 16  # tokens, blocks


def samples_of(path: str, **settings) -> TextDataset:
    """Open a whole text with smaller groups than in a run."""
    text = opened(path, **settings)
    text.source.group = GROUP
    return TextDataset("train", text, (0, text.source.blocks), S, 7, 0)


def steps(samples: Samples, world: int, *, consumed: int = 0, end: int, num_workers: int) -> list[list[int]]:
    """Return the samples that all ranks read, in order; their workers read concurrently."""
    schedule = BatchSchedule(4, 24, world)
    loaders = [
        MicroBatches(samples, schedule, rank=rank, consumed=consumed, end=end, num_workers=num_workers)
        for rank in range(world)
    ]
    rows: list[list[int]] = []
    streams = [iter(loader) for loader in loaders]
    for _ in range((end - consumed) // (4 * world)):
        rows += torch.cat([next(stream) for stream in streams]).tolist()
    for loader in loaders:
        loader.close()
    return rows


@pytest.fixture
def cold(text: str):
    """Open the text again, as a new process would."""

    def open_anew(**settings) -> TextDataset:
        shutil.rmtree(f"{text}.tokens", ignore_errors=True)
        return samples_of(text, **settings)

    return open_anew


def test_samples_are_the_same_for_any_world_workers_and_start(cold, text: str) -> None:
    """With and without the cache of an earlier run, and beyond the first epoch."""
    end = 24 * 150
    whole = steps(cold(), 1, end=end, num_workers=0)
    first_epoch = cold().batch(np.arange(100)).tolist()
    assert whole[:100] == first_epoch
    for world, workers, consumed in ((1, 2, 2400), (2, 1, 3000)):
        rows = steps(cold(num_workers=workers), world, consumed=consumed, end=end, num_workers=workers)
        assert rows == whole[consumed:], (world, workers, consumed)
    kept = samples_of(text, num_workers=2)  # the last of these has tokenised all
    assert steps(kept, 2, consumed=24, end=240, num_workers=2) == whole[24:240]


def test_an_epoch_reads_every_token_once(cold, text: str, documents: list[list[int]]) -> None:
    samples = cold()
    tokens = sum(map(len, documents))
    groups = samples._order.groups
    assert groups > 5
    known = samples_of(text)
    known.prepare(None)
    assert known.windows_per_epoch > tokens / S - 2 * groups
    rows = samples.batch(np.arange(known.windows_per_epoch))
    inputs = rows[:, :-1].ravel()
    assert len(set(inputs.tolist())) == inputs.size  # S - 1 of each group at the most are left out
    assert inputs.size > tokens - groups * S
    # Labels follow their inputs except between blocks.
    assert (np.diff(rows, axis=1) != 1).sum() < 1.2 * opened(text).source.blocks
    second = samples.batch(np.arange(known.windows_per_epoch, 2 * known.windows_per_epoch - 2 * groups))
    assert not np.array_equal(second[:50], rows[:50])
    assert len(set(second[:, :-1].ravel().tolist())) == second[:, :-1].size
    # Neighbours in the order are not neighbours in the text.
    assert np.mean(np.abs(np.diff(rows[:, 0])) < 3 * S) < 0.1


def test_how_often_a_text_will_be_read_is_estimated(cold, text: str, documents: list[list[int]]) -> None:
    """From the first group on, because everything is counted once everything is tokenised."""
    samples, tokens = cold(), sum(map(len, documents))
    assert samples.epochs(100) == []
    samples.prepare(1)
    (part,) = samples.epochs(6000)
    assert (part.name, part.about) == (text, True)
    assert part.times == pytest.approx(6000 * S / tokens, rel=0.2)
    schedule = RunSchedule(BatchSchedule(4, 24, 1), None, 250)
    assert schedule.describe_epochs(samples) == [
        f" train: the run's 6,000 samples read about {part.times:.2f} × {text}",
        f" train: exhausted before the end, and then read again: probably {text}",
    ]
    assert part.times == samples_of(text).with_seed(5).epochs(6000)[0].times
    samples_of(text).prepare(None)
    (part,) = samples.epochs(6000)
    assert (part.times, part.about) == (pytest.approx(6000 * S / tokens), False)
    assert f" read {part.times:.2f} × {text}" in schedule.describe_epochs(samples)[0]


def test_splits_share_no_document(text: str, documents: list[list[int]]) -> None:
    """Documents are never cut."""
    parts = []
    for split in ("train", "valid", "test"):
        data = DataConfig(data_path=(text,), split="60,30,10", num_workers=0)
        samples = getattr(open_run(data, needed=(split,), evaluated=20), split)
        samples.prepare(None)
        rows = samples.batch(np.arange(3 * samples.windows_per_epoch))
        parts.append(set(rows.ravel().tolist()))
    document_of = np.repeat(np.arange(len(documents)), list(map(len, documents)))
    owners = [set(document_of[list(part)].tolist()) for part in parts]
    assert all(not (one & other) for one, other in itertools.combinations(owners, 2))
    assert sum(map(len, parts)) > 0.99 * len(document_of)
    assert [round(10 * len(part) / len(document_of)) for part in parts] == [6, 3, 1]


def test_text_and_tokens_mix_by_weight(text: str, tmp_path: Path) -> None:
    write_by_hand(tmp_path / "tokens", [[60_000] * 300])
    tokens = str(tmp_path / "tokens")
    data = DataConfig(train_data_path=("0.25", text, "0.75", tokens), num_workers=0)
    blend = open_run(data).train
    assert (blend.batch(np.arange(400))[:, 0] == 60_000).sum() == 300
    shutil.copy(text, tmp_path / "half.jsonl")
    os.truncate(tmp_path / "half.jsonl", os.path.getsize(text) // 2)
    (tmp_path / "half.jsonl").write_bytes((tmp_path / "half.jsonl").read_bytes().rpartition(b"\n")[0])
    data = DataConfig(train_data_path=(text, str(tmp_path / "half.jsonl")), num_workers=0)
    by_size = open_run(data).train
    assert by_size.blend.counts(300) == pytest.approx([200, 100], abs=1)


def test_full_validation_reads_each_window_of_each_text_once(tmp_path: Path) -> None:
    """Though the second text has twice as many bytes per token."""
    for name, first, count in (("short", 10, 400), ("long", 60_000, 900)):
        lines = json_lines([list(range(first + n, first + n + 10)) for n in range(0, count, 10)])
        (tmp_path / f"{name}.jsonl").write_bytes(lines)
    paths = tuple(str(tmp_path / f"{name}.jsonl") for name in ("short", "long"))
    windows = open_run(DataConfig(valid_data_path=paths, num_workers=0), needed=("valid",)).valid
    read = windows.batch(np.arange(windows.windows_per_epoch))[:, :-1].ravel()
    assert np.unique(read).size == read.size == sum(count // S * S for count in (400, 900))


def test_a_split_without_a_block_is_refused(tmp_path: Path) -> None:
    data = DataConfig(data_path=(str(tmp_path / "x.jsonl"),), num_workers=0)
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "1 2 3 4 5 6 7 8 9"}\n')
    with pytest.raises(
        ValueError, match=r"^--split 969,30,1 \(the default\): leaves no valid part of .*x\.jsonl.* more text"
    ):
        open_run(data, needed=("train", "valid"), evaluated=20)
    (tmp_path / "x.jsonl").write_bytes(json_lines([[7] * 900]))
    with pytest.raises(ValueError, match=r"cut into 2 blocks; give it a larger share$"):
        open_run(data, needed=("train", "valid"), evaluated=20)


def test_damaged_or_missing_blocks_are_tokenised_again(text: str) -> None:
    expected = samples_of(text).batch(np.arange(500))
    (entry,) = Path(f"{text}.tokens").iterdir()
    first, second, *_, last = sorted(entry.glob("*/*"))
    content = bytearray(first.read_bytes())
    content[20] ^= 1
    first.write_bytes(content)
    second.write_bytes(b"")
    last.unlink()
    counts = bytearray((entry / "counts").read_bytes())
    counts[24 * 40] ^= 1
    (entry / "counts").write_bytes(counts[: -24 * 5])
    assert np.array_equal(samples_of(text).batch(np.arange(500)), expected)


def test_workers_tokenise_each_block_once_and_the_training_process_none(text: str, tmp_path: Path) -> None:
    """Two loaders at a time, as on two ranks; evaluation also reads blocks that workers have tokenised."""
    opened_text = opened(text, num_workers=2)
    opened_text._build = partial(NotingEncoder, tmp_path / "notes", NULL, ("text",), False)
    opened_text.source.group = GROUP
    valid = TextDataset("valid", opened_text, (100, opened_text.source.blocks), S, 7, 50)
    valid.batch(np.arange(50))
    valid.batch(np.arange(1500))  # more than was prepared
    train = TextDataset("train", opened_text, (0, 100), S, 7, 1)
    steps(train, 2, end=12 * 150, num_workers=2)
    processes = (tmp_path / "notes").read_text().split()
    assert len(processes) <= opened_text.source.blocks
    made = opened_text.counts(np.arange(opened_text.source.blocks)) >= 0
    assert len(processes) == made.sum() > 100
    assert len(set(processes)) > 2
    assert str(os.getpid()) not in processes
