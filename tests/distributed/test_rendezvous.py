"""Ranks that start far apart, or whose store stops answering: moments that no other test knows."""

import os
import signal
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from megatron_zpp.distributed import rendezvous as module
from megatron_zpp.distributed.job_store import JobStore, job_key
from megatron_zpp.distributed.topology import Topology
from tests.forkserver import CONTEXT
from tests.support import free_port


def serve(port: int, started: Connection) -> None:
    """Rank 0's process, which keeps the store."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    started.send(True)
    time.sleep(120)
    del store


def test_a_rank_does_not_wait_for_a_store_that_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is stopped between the first answer of its store and the next: a request has no limit itself."""
    port, (ours, theirs) = free_port(), CONTEXT.Pipe()
    server = CONTEXT.Process(target=serve, args=(port, theirs), daemon=True)
    server.start()
    assert ours.poll(60)
    join = module._join

    def join_and_stop(address: str, port: int, deadline: float) -> dist.Store:
        store = join(address, port, deadline + 60)  # that limit is for what follows
        os.kill(server.pid, signal.SIGSTOP)
        return store

    monkeypatch.setattr(module, "_join", join_and_stop)
    monkeypatch.setattr(module, "SAY_AFTER", 0.1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with pytest.raises(ValueError, match=r"RANK 0: does not answer rank 1 on .*; see rank 0's output"):
            module.rendezvous(Topology(1, 2, 0, 1), place, timedelta(seconds=2), say=print, ended=print)
    finally:
        server.kill()


def start(
    rank: int, world: int, place: dict[str, str], limit: float, kept: list[module.Rendezvous] | None = None
) -> str:
    """How the rendezvous of a rank ends, in words; the lifelines of ranks are in other tests.

    Rank 0's has the store, which must be `kept` until the others have read it.
    """
    try:
        met = module.rendezvous(
            Topology(rank, world, 0, 1), place, timedelta(seconds=limit), say=print, ended=print
        )
        if kept is not None:
            kept.append(met)
    except ValueError as error:
        return str(error)
    return "all are there"


def test_ranks_wait_as_long_as_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 starts first, so its own limit passes before rank 2 comes, which is in time for rank 0."""
    monkeypatch.setattr(module, "SAY_AFTER", 0.2)
    place, ends = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, {}
    kept: list[module.Rendezvous] = []

    def run(rank: int, after: float) -> None:
        time.sleep(after)
        ends[rank] = start(rank, 3, place, 6.0, kept)

    threads = [threading.Thread(target=run, args=each) for each in ((1, 0.0), (0, 3.5), (2, 7.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == dict.fromkeys(range(3), "all are there")


@pytest.mark.parametrize("met", [False, True])
def test_a_rank_that_gives_up_ends_the_others(monkeypatch: pytest.MonkeyPatch, met: bool) -> None:
    """The launcher keeps the store. Rank 0 comes after rank 1 has given up, or was suspended before that.

    Without a verdict rank 0 would count on rank 1, or wait for it, for as long as its own limit.
    """
    monkeypatch.setattr(module, "SAY_AFTER", 1.0)
    monkeypatch.setattr(module, "reserve_connections", lambda *_: None)
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if met:
        monkeypatch.setattr(module.secrets, "token_hex", lambda count: "chosen by rank 0")
        ranks = JobStore(dist.PrefixStore("attempt_0", store), job_key(place))
        ranks.set("rank_0", '{"salt": "chosen by rank 0", "seconds": 1.0, "lifelines": 1}')
    line = start(1, 2, place, limit=1.5)
    began = time.monotonic()
    assert start(0, 2, place, limit=20.0) == line
    assert time.monotonic() - began < 15
    what = f"has ended, or did not answer rank 1 on {os.uname().nodename}"
    assert line == f"RANK 0: {what} within --distributed-timeout-minutes 0.025; see rank 0's output"
