"""The cache of Megatron-LM's indexes: built once, keyed by the contents of the data, never incomplete."""

import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.config.data import DataConfig
from megatron_zpp.data import order_cache
from megatron_zpp.data.open import open_splits
from megatron_zpp.data.order_cache import OrderCache
from megatron_zpp.storage import files
from megatron_zpp.storage.checksums import DamagedFile

SAMPLES = np.arange(20)


def opened(config, said, samples=20, seed=1):
    return open_splits(
        config,
        seq_length=8,
        vocab_size=1000,
        seed=seed,
        tokenizer_description=None,
        needed=("train",),
        requested={"train": samples},
        say=said.append,
    ).train


@pytest.fixture
def text(by_hand):
    return by_hand("text", [[number] * 10 for number in range(100)])


@pytest.fixture
def config(text):
    return DataConfig(train_data_path=(text,), dataset_order="megatron")


def test_an_order_is_built_once_beside_the_data(config, text):
    said = []
    first, again = (opened(config, said).batch(SAMPLES).tolist() for _ in range(2))
    assert first == again
    assert len(said) == 1
    assert said[0].startswith(f"building the train order of {text}, 124 samples, once; {text}.orders/")


def test_other_flags_have_another_entry(config):
    said = []
    one, two = (opened(config, said, seed=seed).batch(SAMPLES).tolist() for seed in (1, 2))
    longer = opened(config, said, samples=300)
    assert one != two
    assert len(longer) >= 300
    assert len(said) == 3


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


@pytest.mark.parametrize("damage", ["truncated", "missing", "empty", "flipped", "without checksums"])
def test_a_damaged_entry_is_built_again(config, text, damage):
    said = []
    expected = opened(config, said).batch(SAMPLES).tolist()
    (file,) = Path(text + ".orders").glob("*/shuffle_index.npy")
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "without checksums":
        (file.parent / "checksums.json").unlink()
    else:
        flipped = whole[:-5] + bytes([whole[-5] ^ 4]) + whole[-4:]
        file.write_bytes({"truncated": whole[:-1], "empty": b"", "flipped": flipped}[damage])
    assert opened(config, said).batch(SAMPLES).tolist() == expected
    assert len(said) == 2
    assert said[1].startswith(f"building the train order of {text}, 124 samples, again: ")
    assert str(file.parent) in said[1]
    assert file.read_bytes() == whole
    opened(config, said)
    assert len(said) == 2


def test_one_builds_while_others_wait(config):
    said = []
    with ThreadPoolExecutor(8) as pool:
        orders = list(pool.map(lambda _: opened(config, said).batch(SAMPLES).tolist(), range(8)))
    assert len(said) == 1
    assert all(order == orders[0] for order in orders)


def cached(directory, said, build=lambda files: files.save("x", SAMPLES)):
    return OrderCache("--data-cache-path", str(directory), said.append).get(
        {"of": 1}, ("x",), build, "the order"
    )["x"]


def test_ranks_that_waited_for_a_build_check_it_at_once(tmp_path, monkeypatch):
    """One after another, 1,024 ranks would take a thousand times as long as one."""
    ranks, real, said = 6, order_cache.verify_arrays, []
    together, waiting = threading.Barrier(ranks - 1), threading.Semaphore(0)

    def verify(entry, names):
        together.wait(timeout=60)
        real(entry, names)

    @contextmanager
    def locked(path):
        waiting.release()
        with files.locked(path) as held:
            yield held

    def build(files):
        for _ in range(ranks):
            assert waiting.acquire(timeout=60)
        files.save("x", SAMPLES)

    monkeypatch.setattr(order_cache, "verify_arrays", verify)
    monkeypatch.setattr(order_cache, "locked", locked)
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(lambda _: cached(tmp_path / "orders", said, build)[:].tolist(), range(ranks)))
    assert found == [SAMPLES.tolist()] * ranks
    assert len(said) == 1


def test_an_error_of_one_rank_leaves_the_entry_of_all_others(tmp_path, monkeypatch):
    directory, said = tmp_path / "orders", []
    others, real = cached(directory, said), order_cache.verify_arrays
    whole = sorted(path.name for path in directory.rglob("*"))

    def failing(entry, names):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(entry))

    monkeypatch.setattr(order_cache, "verify_arrays", failing)
    fix = "Too many open files; start again once it can be read, or name another directory$"
    with pytest.raises(ValueError, match=rf"^--data-cache-path {directory}: {directory}/\w+: {fix}"):
        cached(directory, said)
    monkeypatch.setattr(order_cache, "verify_arrays", real)
    assert cached(directory, said)[:].tolist() == others[:].tolist() == SAMPLES.tolist()
    assert sorted(path.name for path in directory.rglob("*")) == whole
    assert len(said) == 1


def test_damage_that_a_second_check_does_not_find_replaces_nothing(tmp_path, monkeypatch):
    directory, said, real, flips = tmp_path / "orders", [], order_cache.verify_arrays, [True]
    cached(directory, said)

    def once(entry, names):
        if flips:
            flips.pop()
            raise DamagedFile("x")
        real(entry, names)

    monkeypatch.setattr(order_cache, "verify_arrays", once)
    cached(directory, said)
    assert not flips
    assert len(said) == 1


def test_a_replaced_entry_stays_for_those_who_have_it_open_and_is_removed_later(tmp_path):
    """A network file system takes the files away from all hosts when one host removes them."""
    directory, said = tmp_path / "orders", []
    opened = cached(directory, said)
    (file,) = directory.glob("*/x.npy")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"?")
    cached(directory, said)
    assert len(said) == 2
    (replaced,) = directory.glob("*.replaced-*")
    assert os.fstat(opened._file._descriptor).st_nlink == 1
    for days in (29, 31):
        old = time.time() - days * 86400
        os.utime(replaced, (old, old))
        file.write_bytes(b"")
        cached(directory, said)
        assert replaced.exists() == (days < 30)
        assert len(list(directory.glob("*.replaced-*"))) == 2
        assert file.read_bytes() == content


def test_a_killed_build_leaves_no_entry(config, text):
    said = []
    expected = opened(config, said).batch(SAMPLES).tolist()
    (entry,) = (path for path in Path(text + ".orders").iterdir() if path.is_dir())
    shutil.move(entry, entry.with_name(f"{entry.name}.building-killed"))
    assert opened(config, said).batch(SAMPLES).tolist() == expected
    assert len(said) == 2


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
