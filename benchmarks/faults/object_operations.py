"""Saves, loads, removals, leases and reads in an object store, with a fault at each of their requests.

All of it happens in one process, with moto's server. Pauses between attempts are left out.
"""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.crash_operations import Case, Operation, checkpoints, engines, outcome_of
from benchmarks.faults.faulty_store import (
    BROKEN,
    BUCKET,
    BUSY,
    DENIED,
    FLIPPED,
    HALF,
    UNANSWERED,
    UNSENT,
    FaultyStore,
    RequestFault,
    faulty_store,
)
from megatron_zpp.checkpoint.directory import TRACKER, committed
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.storage.lease import Lease
from megatron_zpp.storage.object_path import ObjectPath

_KILLED = "killed before a request", "killed before an answer"
_PASSING = (  # of which one attempt fails: no operation may
    ("503 for a request", partial(RequestFault, BUSY)),
    ("500 for a request", partial(RequestFault, BROKEN)),
    ("connection lost before a request", partial(RequestFault, UNSENT)),
    ("connection lost before an answer", partial(RequestFault, UNANSWERED)),
    ("connection lost in an answer", partial(RequestFault, HALF)),
)
_LASTING = (
    (_KILLED[0], partial(RequestFault, UNSENT, lasts=True)),
    (_KILLED[1], partial(RequestFault, UNANSWERED, lasts=True, then=UNSENT)),
    ("503 from a request on", partial(RequestFault, BUSY, lasts=True)),
    ("denied from a request on", partial(RequestFault, DENIED, lasts=True)),
    ("denied for a request", partial(RequestFault, DENIED)),
)
_FLIPPED = ("a bit of an object flipped on its way", partial(RequestFault, FLIPPED))


def cases(directory: Path) -> Iterator[tuple[str, Case]]:
    """Every fault at every request of every operation: its name, and what runs it.

    A case has to be run before the next one is asked for.
    """
    with faulty_store() as store:
        yield from _cases(directory, store)


def _cases(directory: Path, store: FaultyStore) -> Iterator[tuple[str, Case]]:
    here = ObjectPath(BUCKET, "here")
    for operation in (*_leases(), *_data(directory, store), *_checkpoints(store)):
        run = partial(_case, operation, here, store)
        _fresh(here, operation, store)
        store.arm(None)
        operation.act(here)
        requests = store.disarm(), list(store.requests)
        expected = operation.result(here), operation.hint(here)
        for number in range(1, requests[0] + 1):
            faults = [*_PASSING, *(() if operation.name == "lease" else _LASTING)]
            request = requests[1][number - 1]
            if request.startswith(f"GET /{BUCKET}/here/") and ".bin?" not in request:  # tokens: --verify-data
                faults.append(_FLIPPED)
            for name, fault in faults:
                yield f"{operation.name}: {name}", partial(run, name, fault(number), expected)


def _fresh(here: ObjectPath, operation: Operation[ObjectPath], store: FaultyStore) -> None:
    store.clear(f"{here.key}/")
    store.copy(f"{operation.before.key}/", f"{here.key}/")


def _case(
    operation: Operation[ObjectPath],
    here: ObjectPath,
    store: FaultyStore,
    name: str,
    fault: RequestFault,
    expected: tuple[Any, Any],
) -> tuple[str, str]:
    _fresh(here, operation, store)
    passes = "one lost attempt is an error" if name in dict(_PASSING) else None
    arm = partial(store.arm, fault)
    return outcome_of(operation, here, expected, arm, store.disarm, passes=passes, kills=name in _KILLED)


def _checkpoints(store: FaultyStore) -> Iterator[Operation[ObjectPath]]:
    def others(here: ObjectPath) -> list[str]:
        """Objects of no checkpoint, and uploads that have not ended."""
        prefixes = tuple(f"{path.name}/" for path in committed(here).values())
        keys = [key for key in store.keys(f"{here.key}/") if not key.startswith(prefixes) and key != TRACKER]
        return [*keys, *store.uploads(f"{here.key}/")]

    for number, (name, engine) in enumerate(engines().items()):
        if number in (0, 4):
            one, two = (ObjectPath(BUCKET, f"before/{number}/{which}") for which in ("one", "two"))
            yield from checkpoints(one, two, name, engine, others)


def _leases() -> Iterator[Operation[ObjectPath]]:
    def act(here: ObjectPath) -> None:
        with Lease(here, print) as lease:
            lease.check()

    def result(here: ObjectPath) -> bool:
        return here.exists()

    yield Operation("lease", ObjectPath(BUCKET, "before/lease"), act, lambda here: "", result)


def _data(directory: Path, store: FaultyStore) -> Iterator[Operation[ObjectPath]]:
    """A data set is opened and read, with or without copies of its index that are there already."""
    local, cache = directory / "data", directory / "cache"
    with IndexedDatasetWriter(str(local), np.dtype(np.uint16)) as writer:
        for length in range(1, 40):
            writer.add_document(np.arange(length, dtype=np.uint16))
    for path in directory.glob("data.*"):
        store.client.put_object(Bucket=BUCKET, Key=f"before/data/{path.name}", Body=path.read_bytes())
    expected = IndexedDataset(local).tokens[:].tobytes()

    def act(copied: bool, here: ObjectPath) -> None:
        if not copied:
            shutil.rmtree(cache, ignore_errors=True)
        data = IndexedDataset(str(here / "data"), str(cache))
        if (data.tokens[:].tobytes(), data.lengths[:].tolist()) != (expected, list(range(1, 40))):
            raise AssertionError("other tokens were read")

    def result(here: ObjectPath) -> list[str]:
        return sorted(path.name for path in cache.rglob("*"))

    for name, copied in (("data", False), ("data, index copied before", True)):
        before = ObjectPath(BUCKET, "before/data")
        yield Operation(name, before, partial(act, copied), lambda here: "", result)
