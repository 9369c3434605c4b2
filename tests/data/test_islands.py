"""Islands together read what one job of all their batches reads, of any data, also after one resumed."""

from itertools import chain

import pytest

from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.islands import IslandsConfig
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.islands import share_of
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.resume import ResumedData, resume_data
from megatron_zpp.tokenizer import build_tokenizer, describe
from tests.data.conftest import open_data
from tests.data.format_by_hand import write_by_hand
from tests.data.text.conftest import EOD, NULL, json_lines
from tests.support import refusal

NAMES, BATCH, STEPS = ("west", "east", "north"), 4, 6
MASKS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
KINDS = {
    "windows": {"data_path": ("a",)},
    "masks": {"data_path": ("a",), **MASKS},
    "packed": {"data_path": ("a",), "dataset_packing": "best-fit"},
    "blend": {"data_path": ("0.3", "a", "0.7", "b")},
    "megatron": {"data_path": ("0.3", "a", "0.7", "b"), "dataset_order": "megatron"},
    "text": {"data_path": ("text-0.jsonl",)},
    "shards": {"data_path": ("text-*.jsonl",)},
    "mock": {"mock_data": True},
}


def island(name):
    return IslandsConfig(islands_at="hub:1", island=name, island_names=NAMES, island_secret="secret")


@pytest.fixture
def samples(request, tmp_path, monkeypatch):
    """The training samples of all islands, of the kind that is asked for, and their settings."""
    monkeypatch.chdir(tmp_path)
    documents = [[*range(7 * n, 7 * n + 6), EOD] for n in range(200)]
    for name, part in (("a", documents[:110]), ("b", documents[110:])):
        write_by_hand(tmp_path / name, part, kind="i")
    for number in range(2):
        (tmp_path / f"text-{number}.jsonl").write_bytes(
            json_lines([ids[:-1] for ids in documents[number::2]])
        )
    data = DataConfig(split="100,0,0", data_cache_path=str(tmp_path / "cache"), **KINDS[request.param])
    description = describe(build_tokenizer(NULL))
    requested = {"train": BATCH * STEPS * len(NAMES)}
    more = {"tokenizer": NULL, "tokenizer_description": description, "requested": requested}
    return open_data(data, vocab_size=description["vocab_size"], **more).train, data


def steps(samples, size, ranks, consumed=0, workers=0):
    """The rows of each step from a number of samples on, sorted."""
    schedule, end = BatchSchedule(1, size, ranks), size * STEPS
    loaders = [
        MicroBatches(samples, schedule, rank=rank, consumed=consumed, end=end, num_workers=workers)
        for rank in range(ranks)
    ]
    rows = []
    for loader in loaders:
        with loader:
            rows.append([str(batch) for batch in loader])
    taken = size // ranks
    return [
        sorted(row for own in rows for row in own[first : first + taken])
        for first in range(0, len(rows[0]), taken)
    ]


@pytest.mark.parametrize("samples", KINDS, indirect=True)
def test_islands_read_what_one_job_of_all_batches_reads(samples):
    samples, _ = samples
    all_of_them = ResumedData(samples, None, [])
    shares = [share_of(all_of_them, island(name)).samples for name in NAMES]
    together = [steps(share, BATCH, ranks) for ranks, share in zip((1, 2, 4), shares, strict=True)]
    assert [sorted(chain(*parts)) for parts in zip(*together, strict=True)] == steps(samples, 12, 1)
    assert steps(shares[0], BATCH, 4, consumed=8, workers=1) == together[0][2:]
    part, whole = shares[2].epochs(10), samples.epochs(30)
    assert [epochs.times for epochs in part] == [epochs.times for epochs in whole]


@pytest.mark.parametrize("samples", ["blend"], indirect=True)
def test_a_blend_does_not_change_while_islands_run(samples):
    samples, data = samples
    begun = resume_data(samples, None, consumed=0, data=data, train_seed=1).dataset_progress
    other = DataConfig(data_path=("0.5", "a", "0.5", "b"), split="100,0,0")
    changed = open_data(other, vocab_size=EOD + 1).train
    resumed = resume_data(changed, begun, consumed=24, data=other, train_seed=1)
    error = refusal(share_of, resumed, island("west"))
    assert error.startswith("--islands-at hub:1: data sets and weights cannot change while islands run; ")
