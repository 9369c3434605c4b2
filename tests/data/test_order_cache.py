"""The cache of Megatron-LM's indexes: built once, keyed by the contents of the data, never incomplete."""

import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.config.data import DataConfig
from megatron_zpp.data import order_cache
from megatron_zpp.data.order_cache import OrderCache
from megatron_zpp.storage import files
from tests.data.conftest import open_data
from tests.support import refusal

SAMPLES = np.arange(20)


def opened(config, said, samples=20, seed=1):
    return open_data(config, seed=seed, requested={"train": samples}, say=said.append).train


@pytest.fixture
def config(text):
    return DataConfig(train_data_path=(text,), dataset_order="megatron")


def test_an_order_is_built_once_beside_the_data_for_the_same_flags(config, text):
    said = []
    first, again, other = (opened(config, said, seed=seed).batch(SAMPLES).tolist() for seed in (1, 1, 2))
    assert first == again != other
    assert len(opened(config, said, samples=300)) >= 300
    assert len(said) == 3
    assert said[0].startswith(f"building the train order of {text}, 124 samples, once; {text}.orders/")


def test_changed_data_is_seen(config, text, by_hand):
    """Even if the size and the times of the files have not changed."""
    said = []
    before = opened(config, said).indexes["sample_index"][:].tolist()
    status = os.stat(text + ".idx")
    by_hand("text", [[number] * (1 if number % 2 else 19) for number in range(100)])
    os.utime(text + ".idx", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert os.stat(text + ".idx").st_size == status.st_size
    assert opened(config, said).indexes["sample_index"][:].tolist() != before
    assert len(said) == 2


@pytest.mark.parametrize("damage", ["missing", "flipped", "without checksums"])
def test_a_damaged_entry_is_an_error_and_built_again_once_it_is_removed(config, text, damage):
    expected = opened(config, []).batch(SAMPLES).tolist()
    (file,) = Path(text + ".orders").glob("*/shuffle_index.npy")
    if damage == "flipped":
        whole = file.read_bytes()
        file.write_bytes(whole[:-5] + bytes([whole[-5] ^ 4]) + whole[-4:])
    else:
        (file if damage == "missing" else file.parent / "checksums.json").unlink()
    said = refusal(opened, config, [])
    assert re.match(rf"--data-cache-path \(not given\) .*; if it is damaged, remove .*{file.parent}", said), (
        said
    )
    shutil.rmtree(file.parent)
    assert opened(config, []).batch(SAMPLES).tolist() == expected


def cached(directory, said, build=lambda: [("x", SAMPLES)]):
    config = DataConfig(mock_data=True, data_cache_path=str(directory))
    return OrderCache(config, "", said.append).get({"indexes": ("x",)}, build, "the order")["x"]


def test_ranks_that_waited_for_a_build_check_it_at_once(tmp_path, monkeypatch):
    """One after another, 1,024 ranks would take a thousand times as long as one."""
    ranks, real, said = 6, order_cache.verify_arrays, []
    together, waiting = threading.Barrier(ranks), threading.Semaphore(0)

    def verify(entry, names):
        together.wait(timeout=60)
        real(entry, names)

    @contextmanager
    def locked(path):
        waiting.release()
        with files.locked(path) as held:
            yield held

    def build():
        for _ in range(ranks):
            assert waiting.acquire(timeout=60)
        return [("x", SAMPLES)]

    monkeypatch.setattr(order_cache, "verify_arrays", verify)
    monkeypatch.setattr(order_cache, "locked", locked)
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(lambda _: cached(tmp_path / "orders", said, build)[:].tolist(), range(ranks)))
    assert found == [SAMPLES.tolist()] * ranks
    assert len(said) == 1


def test_a_directory_that_cannot_be_written_is_an_error(text, tmp_path):
    (tmp_path / "file").write_text("")
    config = DataConfig(
        train_data_path=(text,), dataset_order="megatron", data_cache_path=str(tmp_path / "file" / "x")
    )
    with pytest.raises(ValueError, match=rf"^--data-cache-path {tmp_path}/file/x: Not a directory; name a"):
        opened(config, [])


def test_workers_get_paths_not_arrays(config):
    samples = opened(config, [], samples=100_000)
    pickled = ForkingPickler.dumps(samples)
    assert len(pickled) < 10_000
    assert ForkingPickler.loads(pickled).batch(SAMPLES).tolist() == samples.batch(SAMPLES).tolist()


def test_a_token_outside_the_vocabulary_is_named(by_hand):
    path = by_hand("text", [[1] * 10, [2] * 7, [3, 1000, 3, 3]])
    config = DataConfig(train_data_path=(path,), dataset_order="megatron")
    with pytest.raises(ValueError, match=rf"{path}.bin: byte 36: token 18 is 1000, outside the vocabulary"):
        opened(config, [])
