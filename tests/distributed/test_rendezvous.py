"""A rank whose store stops answering, of which no other test knows the moment."""

import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from megatron_zpp.distributed import rendezvous as module
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
            module.rendezvous(
                Topology(1, 2, 0, 1), place, limit=2.0, timeout=timedelta(minutes=1), say=lambda line: None
            )
    finally:
        server.kill()
