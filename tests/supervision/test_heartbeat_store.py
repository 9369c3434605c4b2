"""Heartbeats and the store that carries them: time-outs, good-byes, and a store that stops."""

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.heartbeat import heartbeat
from megatron_zpp.supervision.heartbeat_messages import HeartbeatMessage
from tests.forkserver import CONTEXT
from tests.support import free_port, wait_until

PATIENCE = 120  # seconds


@pytest.mark.parametrize("timeout", [600, 1e9])
def test_a_heartbeat_that_comes_after_the_collectives_give_up_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match=r"--heartbeat-timeout .* --distributed-timeout-minutes 10"):
        DistributedConfig(heartbeat_timeout=timeout)


class Recorded:
    """A store that records the calls of its methods."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.calls = store, []

    def clone(self) -> "Recorded":
        return self

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*given: object) -> object:
            self.calls.append((name, *given))
            return getattr(self._store, name)(*given)

        return call


def test_a_rank_sends_nothing_after_its_good_bye() -> None:
    """Rank 0 closes the store once it has read the good-bye; a request under way then fails."""
    store = Recorded(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    with heartbeat(store, Topology(1, 2, 1, 2), 6.0, "test"):
        wait_until(lambda: any(name == "multi_get" for name, *_ in store.calls), 30)
    *before, (name, key, said) = store.calls
    assert (name, key, HeartbeatMessage.decode(said).left) == ("set", "heartbeat/1", True)
    assert not any(HeartbeatMessage.decode(given[1]).left for name, *given in before if name == "set")


def host_store(port: int, ready: Event) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    ready.set()
    time.sleep(PATIENCE)
    del store


def enter_when_rank_0_stops(port: int, rank_0: int, said: Path) -> None:
    """Rank 1, whose rank 0 is stopped after both have met and before heartbeats begin."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))
    os.kill(rank_0, signal.SIGSTOP)
    with heartbeat(store, Topology(1, 2, 1, 2), 1.0, "prog"):
        time.sleep(PATIENCE)


def test_a_rank_0_that_stops_just_before_the_heartbeats_is_found(tmp_path: Path) -> None:
    port, ready, said = free_port(), CONTEXT.Event(), tmp_path / "said"
    rank_0 = CONTEXT.Process(target=host_store, args=(port, ready))
    rank_0.start()
    try:
        assert ready.wait(PATIENCE)
        rank_1 = CONTEXT.Process(target=enter_when_rank_0_stops, args=(port, rank_0.pid, said))
        rank_1.start()
        rank_1.join(PATIENCE / 2)
        ended = rank_1.exitcode
        rank_1.kill()
    finally:
        rank_0.kill()
    assert ended == 1
    line = r"prog .*rank 1\]: error: rank 0, where the run's store is kept, .*\n"
    assert re.fullmatch(line, said.read_text())
