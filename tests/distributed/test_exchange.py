"""Values that ranks exchange through a store: how many requests that takes, and what ends a wait."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

from megatron_zpp.distributed import exchange as module
from megatron_zpp.distributed.exchange import Abandoned, Exchange, NoProgress, _Patience
from megatron_zpp.distributed.topology import Topology
from tests.forkserver import CONTEXT
from tests.support import wait_until

_AT_ONCE = (
    30  # seconds, on a machine that is busy with other tests; time-outs are longer, or tested by requests
)


class Counted:
    """A store whose requests are counted, also those of its clones."""

    def __init__(self, store: dist.Store, requests: Counter[str]) -> None:
        self._store, self.requests = store, requests

    def clone(self) -> "Counted":
        return Counted(self._store.clone(), self.requests)

    def set_timeout(self, timeout: timedelta) -> None:
        """No request."""
        self._store.set_timeout(timeout)

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*given: object) -> object:
            self.requests[name] += 1
            return getattr(self._store, name)(*given)

        return call


def served() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def exchanges(
    store: dist.Store, ranks: int, seconds: float = 60
) -> tuple[list[Exchange], list[Counter[str]]]:
    """An exchange for each rank, and the requests that it sends."""
    counted = [Counted(store, Counter()) for _ in range(ranks)]
    made = [
        Exchange(one, Topology(rank, ranks, rank, ranks), timedelta(seconds=seconds), "x", hint="; all must")
        for rank, one in enumerate(counted)
    ]
    return made, [one.requests for one in counted]


def on_threads(work: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result() for future in [pool.submit(each) for each in work]]


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "exchange"]


@pytest.mark.parametrize("make", [served, dist.HashStore])
def test_values_of_all_ranks_are_combined_and_their_parts_deleted(make: Callable[[], dist.Store]) -> None:
    store, ranks = make(), 5
    made, requests = exchanges(store, ranks)
    before = store.num_keys()
    for call, expected in (
        (lambda one: one.all_gather("all", one.topology.rank**2), [0, 1, 4, 9, 16]),
        (lambda one: one.combine("sum", one.topology.rank, sum), 10),
        (lambda one: one.first("third", "it" if one.topology.rank > 1 else None), "it"),
        (lambda one: one.first("none", None), None),
    ):
        assert on_threads([lambda one=one, call=call: call(one) for one in made]) == [expected] * ranks
    assert store.num_keys() - before == 4
    each = {"set": 4, "wait": 4, "multi_get": 4, "delete_key": 4}
    assert requests[1:] == [Counter(each)] * (ranks - 1)
    assert requests[0] == Counter({"set": 8, "wait": 8, "multi_get": 8, "delete_key": 4})


def test_a_rank_that_waits_sends_a_request_per_second() -> None:
    store = served()
    made, requests = exchanges(store, 2)
    threading.Timer(2.2, lambda: made[0].put("late", "value")).start()
    started = time.monotonic()
    assert made[1].get("late") == "value"
    assert requests[1].pop("multi_get") <= time.monotonic() - started + 1
    assert requests[1] == Counter({"wait": 1, "compare_set": 1, "add": 1})


@pytest.mark.nightly  # in CI a value that is late arrives in the tests beside
def test_a_store_that_is_stopped_for_long_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a wait is answered late, as after a suspension of all ranks."""
    monkeypatch.setattr(module, "_CONNECT", timedelta(seconds=1))
    pipe, end = CONTEXT.Pipe()
    host = CONTEXT.Process(target=serve, args=(end,))
    host.start()
    try:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), wait_for_workers=False)
        first, second = (
            Exchange(store, Topology(rank, 2, rank, 2), timedelta(seconds=60), "x") for rank in range(2)
        )
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(second.get, "late")
            time.sleep(1.5)
            os.kill(host.pid, signal.SIGSTOP)
            time.sleep(3.5)
            os.kill(host.pid, signal.SIGCONT)
            time.sleep(0.5)
            first.put("late", "value")
            assert waits.result(_AT_ONCE) == "value"
    finally:
        host.kill()
        host.join()


def serve(pipe: Connection) -> None:
    store = served()
    pipe.send(store.port)
    time.sleep(1000)


def test_a_value_that_follows_a_rank_that_gave_up_arrives() -> None:
    store = served()
    (hasty, _), _ = exchanges(store, 2, 0.4)
    (patient, other), _ = exchanges(store, 2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(other.get, "late")
        with pytest.raises(NoProgress, match="'x/late'"):
            hasty.get("late")
        patient.put("late", "value")
        wait_until(lambda: not waiting_threads(), _AT_ONCE)  # no connection is left blocked
        assert waits.result(_AT_ONCE) == "value"
    with pytest.raises(NoProgress):  # at once known to have no value, and awaited all the same
        hasty.get("never")
    threading.Timer(0.2, lambda: patient.put("never", 1)).start()
    assert other.get("never") == 1


def test_an_abandoned_operation_ends_waits_soon() -> None:
    store = served()
    (one, other), _ = exchanges(store, 2)
    threading.Timer(0.5, lambda: one.decide("the disk is full")).start()
    started = time.monotonic()
    with pytest.raises(Abandoned, match="the disk is full"):
        other.get("outcome")
    assert time.monotonic() - started < _AT_ONCE
    wait_until(lambda: not waiting_threads(), _AT_ONCE)


def test_the_time_out_of_a_rank_begins_when_the_ranks_before_it_are_there() -> None:
    store = served()
    made, _ = exchanges(store, 3, 1.2)
    made[0].contribute("part", 0)
    threading.Timer(0.5, lambda: made[1].contribute("part", 1)).start()
    started = time.monotonic()
    with pytest.raises(NoProgress, match=r"^rank 2 reported no progress for 0:00:01.2\d*; all must$"):
        made[0].gather("part")
    assert 1.6 < time.monotonic() - started < _AT_ONCE


def test_progress_of_any_rank_prolongs_a_wait() -> None:
    store = served()
    made, _ = exchanges(store, 2, 1.0)
    over = threading.Event()

    def work() -> None:
        until = time.monotonic() + 2.3
        while time.monotonic() < until and not over.wait(0.05):
            made[1].progress()
        made[1].put("late", "value")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert made[0].get("late") == "value"
    finally:
        over.set()
        thread.join()


def test_a_wait_ends_with_the_store() -> None:
    store = served()
    client = dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    (exchange,), _ = exchanges(client, 1)
    threading.Timer(0.5, lambda held=[store]: held.clear()).start()
    del store
    with pytest.raises(dist.DistError):
        exchange.get("never")


def test_a_store_that_is_gone_is_not_tried_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a wait, nor by its first look for progress, which needs a connection."""
    monkeypatch.setattr(module, "_CONNECT", timedelta(seconds=1))
    store = served()
    client = dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    (exchange,), _ = exchanges(client, 1)
    del store
    started = time.monotonic()
    with pytest.raises(dist.DistError):
        exchange._look(_Patience(timedelta(seconds=60), ["x"]))
    assert time.monotonic() - started < _AT_ONCE
