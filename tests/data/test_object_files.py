"""Data sets in an object store: the same samples as from files, and copies that are never stale."""

from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.config.data import DataConfig
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.indexed import IndexedDataset, verify_tokens
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.storage.checksums import DamagedFile
from tests.data.conftest import open_data
from tests.object_server import BUCKET, ObjectServer


def write(prefix: Path, seed: int) -> str:
    """A data set of documents of 1 to 90 tokens."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for length in random.integers(1, 90, 60):
            writer.add_document(random.integers(0, 100, length).astype(np.uint16))
    return str(prefix)


def store(server: ObjectServer, prefix: str, name: str) -> str:
    """Put a data set into the store; returns its URL."""
    for path in Path(prefix).parent.glob(f"{Path(prefix).name}.*"):
        server.put(f"{name}.{path.name.partition('.')[2]}", path.read_bytes())
    return f"s3://{BUCKET}/{name}"


def batches(prefix: str, order: str, cache: str | None, workers: int = 0) -> np.ndarray:
    """The first 24 samples of the training split."""
    config = DataConfig(
        data_path=(prefix,), split="90,10,0", dataset_order=order, object_storage_cache_path=cache
    )
    splits = open_data(config, seq_length=16, vocab_size=100, requested={"train": 24})
    schedule = BatchSchedule(4, 4, 1)
    with MicroBatches(splits.train, schedule, rank=0, end=24, num_workers=workers) as loader:
        return np.concatenate([batch.numpy() for batch in loader])


@pytest.mark.parametrize(("order", "workers"), [("windows", 1), ("megatron", 0)])
def test_samples_are_those_of_files(server: ObjectServer, tmp_path: Path, order: str, workers: int) -> None:
    prefix = write(tmp_path / "data", 1)
    url, cache = store(server, prefix, f"{order}/{workers}/data"), tmp_path / "cache"
    expected = batches(prefix, order, None)
    assert expected.shape == (24, 17)
    assert (batches(url, order, str(cache), workers) == expected).all()
    copied = {path.name for path in (cache / BUCKET / order / str(workers)).iterdir()}
    assert {"data.idx", "data.checksums.json"} <= copied
    assert "data.bin" not in copied


def test_a_copy_is_renewed_when_the_object_or_the_copy_has_changed(
    server: ObjectServer, tmp_path: Path
) -> None:
    first, second = (write(tmp_path / str(seed), seed) for seed in (1, 2))
    cache = str(tmp_path / "cache")
    for prefix in (first, second):
        url = store(server, prefix, "renewed/data")
        assert (IndexedDataset(url, cache).lengths[:] == IndexedDataset(prefix).lengths[:]).all()
    index = Path(cache, BUCKET, "renewed/data.idx")
    content, modified = index.read_bytes(), index.stat().st_mtime_ns
    for damaged in (content[:-1], content[:50] + b"x" + content[51:], b""):
        index.write_bytes(damaged)
        assert IndexedDataset(url, cache).fingerprint() == IndexedDataset(second).fingerprint()
        assert index.read_bytes() == content
        assert index.stat().st_mtime_ns == modified  # of the object: the same on every node
    server.remove("renewed/data.checksums.json")
    assert IndexedDataset(url, cache).checksums is None
    assert IndexedDataset(url, cache).local == str(index).removesuffix(".idx")
    server.remove("renewed/data.idx")
    with pytest.raises(ValueError, match=f"^{url}.idx: no such file; the data set {url} consists of"):
        IndexedDataset(url, cache)


def test_damage_to_tokens_is_found(server: ObjectServer, tmp_path: Path) -> None:
    prefix, cache = write(tmp_path / "data", 3), str(tmp_path / "cache")
    url = store(server, prefix, "damage/data")
    data = IndexedDataset(url, cache)
    verify_tokens([data], 0, 1)
    content = bytearray(server.get("damage/data.bin"))
    content[20] ^= 1
    server.put("damage/data.bin", bytes(content))
    with pytest.raises(DamagedFile, match=f"^{url}.bin: damaged between bytes 0 and {len(content)}: "):
        verify_tokens([data], 0, 1)
    with pytest.raises(DamagedFile, match=f"^{url}.bin: bytes 0 to 10 cannot be read: was replaced"):
        data.tokens[:5]
    server.put("damage/data.bin", bytes(content[:-2]))
    with pytest.raises(ValueError, match=f"^{url}.bin: truncated at byte {len(content) - 2}: "):
        IndexedDataset(url, cache)
