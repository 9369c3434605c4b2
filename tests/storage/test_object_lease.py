"""The lease on a directory of an object store, which conditional requests keep to one process."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megatron_zpp.storage.lease import LEASE, Held, Holder, Lease, LeaseLost
from megatron_zpp.storage.location import ObjectError, location
from megatron_zpp.storage.objects import path as object_path
from tests.object_server import BUCKET, ObjectServer, object_server
from tests.support import wait_until

SECONDS = 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


def record(server: ObjectServer, name: str, **changes: Any) -> dict[str, Any]:
    """The record of a lease, after changes to it."""
    key = f"{name}/{LEASE}"
    holder = Holder.decode(server.get(key))
    assert holder
    if changes:
        server.put(key, replace(holder, **changes).encode())
    return json.loads(server.get(key))


def test_it_is_renewed_and_given_back(server: ObjectServer) -> None:
    with Lease(location(f"s3://{BUCKET}/renewed"), print, SECONDS) as lease:
        assert server.keys("renewed/") == [LEASE]
        wait_until(lambda: int(record(server, "renewed")["renewed"]) > 1)
        lease.check()
        with pytest.raises(Held, match=r"process \d+ on .*, started 20\d\d-"):
            Lease(location(f"s3://{BUCKET}/renewed"), print, SECONDS)
    assert server.keys("renewed/") == []


def test_a_dead_process_on_another_host_is_waited_for_once(server: ObjectServer) -> None:
    directory, said = location(f"s3://{BUCKET}/dead"), list[str]()
    first = Lease(directory, print)
    record(server, "dead", boot="other", host="far", lease="x")
    with Lease(directory, said.append, SECONDS):
        with pytest.raises(LeaseLost, match=r"was taken over by process \d+ on "):
            first.check()
        first.__exit__()
        assert record(server, "dead")["host"] != "far"  # it was not the first one's to remove
    assert len(said) == 1
    assert "on far, started" in said[0]


def test_of_several_that_take_it_over_at_once_one_has_it(server: ObjectServer) -> None:
    directory, outcomes, over = location(f"s3://{BUCKET}/several"), list[str](), threading.Event()
    abandoned = Lease(directory, print)
    abandoned._over.set()
    record(server, "several", boot="other", lease="x")
    barrier = threading.Barrier(3)

    def take() -> None:
        barrier.wait()
        try:
            with Lease(directory, lambda line: None, SECONDS):
                outcomes.append("held")
                over.wait(60)
        except Held:
            outcomes.append("refused")

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(outcomes) == 3)
    over.set()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", "refused", "refused"]


def test_a_renewal_whose_answer_was_lost_does_not_lose_the_lease(server: ObjectServer) -> None:
    with Lease(location(f"s3://{BUCKET}/answer"), print, SECONDS) as lease:
        record(server, "answer", renewed=99)  # ours, as the holder would have written it
        wait_until(lambda: record(server, "answer")["renewed"] != "0000000099")
        lease.check()
        assert not lease.lost


def test_a_store_without_conditions_is_refused(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = object_path.request

    def unconditional(url: str, operation: str, **arguments: Any) -> dict[str, Any]:
        kept = {name: value for name, value in arguments.items() if not name.startswith("If")}
        return whole(url, operation, **kept)

    monkeypatch.setattr(object_path, "request", unconditional)
    with pytest.raises(ObjectError, match=f"^s3://{BUCKET}/without: the store ignores conditions of"):
        Lease(location(f"s3://{BUCKET}/without"), print)
    assert server.keys("without/") == []


def test_a_suspended_holder_finds_out(server: ObjectServer) -> None:
    directory = location(f"s3://{BUCKET}/suspended")
    with Lease(directory, print, SECONDS) as lease:
        record(server, "suspended", lease="0" * 16)
        wait_until(lambda: lease.lost)
        time.sleep(SECONDS)
        assert record(server, "suspended")["lease"] == "0" * 16  # and does not renew any more
    assert server.keys("suspended/") == [LEASE]
