"""The order of text in shards: the same for all readers and starting points, and a resumed run's checks."""

import json
import os
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.dataset_progress import DatasetProgress
from megatron_zpp.data.resume import changed_shard
from megatron_zpp.data.text.order import GroupOrder, ShardOrder
from tests.data.text.conftest import json_lines
from tests.data.text.test_blends import resumed
from tests.data.text.test_order import samples_of, steps
from tests.data.text.test_shards import write_shards
from tests.support import refusal


def order(first: int, last: int, seed: int = 3) -> ShardOrder:
    return ShardOrder(first, last, 12, seed, stretches=STRETCHES)


STRETCHES = np.cumsum([0, *np.random.default_rng(0).integers(0, 20, 50)])


def test_an_epoch_reads_each_block_once_eight_stretches_at_a_time() -> None:
    first, last = 7, int(STRETCHES[-1]) - 5
    epochs = []
    for epoch in range(3):
        each = order(first, last)
        groups = [each.blocks(epoch * each.groups + group) for group in range(each.groups)]
        assert max(map(len, groups)) < 2 * 12
        epochs.append(np.concatenate(groups))
        assert np.array_equal(np.sort(epochs[-1]), np.arange(first, last))
        stretch = np.searchsorted(STRETCHES, epochs[-1], side="right")
        for number in np.unique(stretch):
            assert (np.diff(epochs[-1][stretch == number]) == 1).all()  # each of them forward
        begin = {number: np.flatnonzero(stretch == number)[0] for number in np.unique(stretch)}
        end = {number: np.flatnonzero(stretch == number)[-1] for number in begin}
        together = [sum(begin[n] <= k <= end[n] for n in begin) for k in range(stretch.size)]
        assert max(together) == 8
    assert not any(np.array_equal(epochs[a], epochs[b]) for a, b in ((0, 1), (1, 2), (0, 2)))
    assert not np.array_equal(order(first, last, 4).blocks(0), order(first, last).blocks(0))


def test_orders_are_those_by_which_runs_have_begun() -> None:
    """A resumed run relies on each of them."""
    assert order(7, 100).blocks(0).tolist() == [82, 54, 17, 70, 7, 83, 44, 55, 39, 18, 71, 84, 8]
    groups = GroupOrder(0, 40, 8, 3)
    assert groups.blocks(6).tolist() == [33, 36, 37, 10, 39, 11, 23, 24]
    assert groups.windows(6, 1000, 30).starts(np.arange(31, 36)).tolist() == [498, 778, 433, 253, 133]


@pytest.fixture
def shards(documents: list[list[int]], tmp_path: Path) -> str:
    return write_shards(tmp_path / "shards", "parquet", documents)


def test_samples_are_the_same_for_any_world_workers_and_start(shards: str, tmp_path: Path) -> None:
    """With and without the cache of an earlier run, and beyond the first epoch."""
    pattern, end = shards, 24 * 150
    whole = steps(samples_of(pattern, num_workers=0), 1, end=end, num_workers=0)
    assert len({tuple(row) for row in whole[:1000]}) == 1000
    for world, workers, consumed in ((1, 2, 2400), (2, 1, 3000)):
        if world > 1:
            shutil.rmtree(tmp_path / "shards.tokens")
        samples = samples_of(pattern, num_workers=workers)
        rows = steps(samples, world, consumed=consumed, end=end, num_workers=workers)
        assert rows == whole[consumed:], (world, workers, consumed)


def in_two_languages(directory: Path) -> str:
    """Write shards whose names repeat in subdirectories, as downloads have them; return their glob."""
    for number, language in enumerate(("de", "en")):
        for shard in range(2):
            part = directory / language / f"train-{shard}.jsonl"
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(json_lines([[9 * number + 3 * shard + 1] * 40] * 60))
    return str(directory / "*" / "*.jsonl")


def test_moved_shards_of_several_directories_continue_or_are_named(tmp_path: Path) -> None:
    first = resumed(None, 0, in_two_languages(tmp_path / "shards"))
    shutil.copytree(tmp_path / "shards", tmp_path / "b" / "c")
    there, numbers = str(tmp_path / "b" / "c" / "*" / "*.jsonl"), np.arange(100, 200)
    moved = resumed(first, 100, there)
    assert moved.lines == []
    assert np.array_equal(moved.samples.batch(numbers), first.samples.batch(numbers))
    assert resumed(moved, 200, there).lines == []
    os.utime(tmp_path / "b" / "c" / "en" / "train-0.jsonl", (1, 1))  # the run knows them by their new names
    assert "/en/train-0.jsonl was modified since the checkpoint" in refusal(resumed, moved, 200, there)
    (tmp_path / "flat").mkdir()
    for number, path in enumerate(sorted((tmp_path / "shards").rglob("*.jsonl"))):
        shutil.copy(path, tmp_path / "flat" / f"{number}.jsonl")
    assert resumed(first, 100, str(tmp_path / "flat" / "*.jsonl")).lines == []
    saved, present = (
        [record for part in resumed(None, 0, pattern).dataset_progress.sets for record in part.shards]
        for pattern in (str(tmp_path / name / "*" / "*.jsonl") for name in ("shards", "b/c"))
    )
    assert changed_shard(saved, present) is None
    changed = [*present[:2], replace(present[2], contents="0"), present[3]]
    assert changed_shard(saved, changed) == f"{present[2].name} has changed since the checkpoint"
    assert changed_shard(saved, present[:3]) == f"{saved[3].name} is missing since the checkpoint"
    assert changed_shard(saved[:3], present) == f"{present[3].name} is new since the checkpoint"
    assert changed_shard(saved, present[::-1]) == f"{present[3].name} has changed since the checkpoint"


def replace_shard(path: Path, other: Path) -> None:
    """Give a shard the contents of another one, at the same time and place."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    shutil.copyfile(other, path)
    os.utime(path, ns=times)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path, _: path.rename(path.with_stem("3")), r"/03\.parquet is missing since the checkpoint"),
        (replace_shard, r"/03\.parquet has changed since the checkpoint"),
        (lambda path, other: os.utime(path, (1, 1)), r"/03\.parquet was modified since the checkpoint"),
    ],
    ids=["renamed", "changed", "touched"],
)
def test_a_changed_shard_is_refused(shards: str, change, message: str) -> None:
    first, directory = resumed(None, 0, shards), Path(shards).parent
    change(directory / "03.parquet", directory / "04.parquet")
    assert re.match(r"--train-data-path .*: shard .*" + message, refusal(resumed, first, 100, shards))
    assert resumed(first, 0, shards).lines == []  # nothing was read


def test_a_record_of_shards_survives_the_checkpoint(shards: str) -> None:
    first = resumed(None, 0, shards).dataset_progress
    saved = json.loads(json.dumps(asdict(first)))
    assert DatasetProgress.from_json(saved) == first
    assert len(first.sets[0].shards) == 7
    saved["sets"][0]["shards"][0]["modified"] = "yesterday"
    with pytest.raises(ValueError, match="not a valid record of a shard"):
        DatasetProgress.from_json(saved)
    del saved["sets"][0]["shards"]  # an older checkpoint
    assert DatasetProgress.from_json(saved).sets[0].shards == ()
    for name in ("prefix", "fingerprint"):
        with pytest.raises(ValueError, match="not a valid record of one data set"):
            DatasetProgress.from_json(saved | {"sets": [saved["sets"][0] | {name: 3}]})
