"""Runs whose network or launcher is wrong: each ends soon, with a line that says what is wrong, and where."""

import os
import platform
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from megatron_zpp.distributed import rendezvous as meeting
from megatron_zpp.distributed.rank_addresses import RankAddress, ranges
from megatron_zpp.distributed.rendezvous import interface_of, rendezvous
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Mesh
from megatron_zpp.supervision import heartbeat
from megatron_zpp.supervision.preflight import Ring, describe_rates, rings_of, slow_links, split_nodes
from megatron_zpp.train.setup import ranks
from tests.config.command_line import SMALLEST
from tests.data.format_by_hand import write_by_hand
from tests.support import Run, environment

FLAGS = [*SMALLEST, "--train-iters", "2", "--device", "cpu"]
AT_ONCE = "--heartbeat-timeout 0 --distributed-timeout-minutes 0.04".split()
SOON = "--heartbeat-timeout 6 --distributed-timeout-minutes 0.15".split()
ON_ANOTHER_NODE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # each node says what its ranks see alike


@pytest.fixture(scope="module", autouse=True)
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Runs that wait before they end, all started at once."""
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(Run(tmp_path_factory.mktemp(name), world))
            for name, world in (("absent", 4), ("silent", 2), ("apart", 2))
        }
        for rank in (0, 2):
            runs["absent"].start(rank, *FLAGS, *SOON, change=say_soon)
        for rank, change in enumerate((say_soon, hang_when_it_joins)):
            runs["apart"].start(rank, *FLAGS, *SOON[:3], "0.3", change=change)
        runs["silent"].start(0, *FLAGS, "--heartbeat-timeout", "8", change=say_soon)
        yield runs


def say_soon() -> None:
    """Missing ranks are named after two seconds instead of ten, and end a run long before gloo gives up."""
    meeting.SAY_AFTER = heartbeat.SAY_AFTER = 2.0
    ranks._NAMED = 0.4


def hang_when_it_joins() -> None:
    ranks.process_group = lambda *_: time.sleep(1000)


def test_a_rank_that_falls_silent_ends_the_run(waiting: dict[str, Run]) -> None:
    """The rank connected, and hangs before it sends anything."""
    run = waiting["silent"]
    place = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=run.port)  # MEGATRON_ZPP_CACHE too: the secret
    met = rendezvous(Topology(1, 2, 1, 2), place, timedelta(seconds=120), say=print, ended=print)
    assert met.own.interface == "lo"
    assert run.statuses() == {0: 1}
    assert "pretrain_gpt.py: waiting for rank 1: starting for " in run.err(0)
    (line,) = run.errors()
    silent = re.search(r"rank 1 has been silent for (\d+) s; last seen: starting", line)
    assert silent, line
    assert 8 <= int(silent[1]) < 120


def test_a_sound_network_is_measured(tmp_path: Path) -> None:
    """Two nodes of two ranks on this machine."""
    with Run(tmp_path, 4) as run:
        for rank in range(4):
            run.start(rank, *FLAGS, LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
        assert run.statuses() == dict.fromkeys(range(4), 0)
        (line,) = (line for line in run.out(0).splitlines() if line.startswith(" preflight: 4 ranks in "))
        assert "inside a node " in line
        assert "between nodes " in line
        assert run.errors() == []


def test_a_port_that_another_program_holds_is_refused(tmp_path: Path) -> None:
    """Rank 0 cannot bind it; the others get no answer and do not wait forever."""
    with Run(tmp_path, 2) as run, socket.create_server(("", int(run.port))):
        run.start(0, *FLAGS)
        run.start(1, *FLAGS, *AT_ONCE, **ON_ANOTHER_NODE)
        assert run.statuses() == {0: 1, 1: 1}
        assert f"error: MASTER_PORT {run.port}: is held by another program there" in run.err(0)
        assert f"MASTER_PORT {run.port}: the program at 127.0.0.1:{run.port} is not this run's" in run.err(1)


def test_a_missing_rank_is_named(waiting: dict[str, Run]) -> None:
    """All ranks are told again and again, and one rank prints the error at the end."""
    run = waiting["absent"]
    assert run.statuses() == {0: 1, 2: 1}
    assert f"[{platform.node()} rank 0]: waiting for ranks 1, 3 of 4 (node 0)\n" in run.err(0)
    (line,) = run.errors()
    assert (
        "WORLD_SIZE 4: ranks 1, 3 of 4 (node 0) did not connect within --distributed-timeout-minutes 0.15"
        in line
    )


def test_a_rank_that_connects_twice_is_refused(tmp_path: Path) -> None:
    with Run(tmp_path, 3) as run:
        run.start(0, *FLAGS)
        run.start(1, *FLAGS)
        run.start(2, *FLAGS, RANK="1")
        assert sum(run.statuses().values()) == 3
        assert all("RANK 1: is taken by process " in line for line in run.errors())
        assert len(run.errors()) in (1, 2)  # rank 0's, and that of the rank that came second


def test_ranks_with_different_settings_are_refused_once(tmp_path: Path) -> None:
    with Run(tmp_path, 4) as run:
        for rank in range(4):
            run.start(rank, *FLAGS, "--seed", "7" if rank in (1, 3) else "6")
        assert set(run.statuses().values()) == {1}
        (line,) = run.errors()
        assert "training.seed differs between ranks: ranks 1, 3 and rank 0 have different values" in line
        assert "(rank 1: 7, rank 0: 6)" in line


def test_nodes_with_unequal_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    """Nodes of 1, 1 and 2 ranks: each of them finds that its own number divides all ranks."""
    with Run(tmp_path, 4) as run:
        for rank in range(4):
            local = (0, 0, 0, 1)[rank]
            run.start(rank, *FLAGS, LOCAL_WORLD_SIZE="1" if rank < 2 else "2", LOCAL_RANK=str(local))
        assert set(run.statuses().values()) == {1}
        assert all(
            "launcher.LOCAL_WORLD_SIZE differs between ranks: ranks 2-3" in line for line in run.errors()
        )


def test_a_node_with_other_data_of_the_same_name_is_named(tmp_path: Path) -> None:
    """Each node may have copies of its own; samples are numbered as if all were alike."""
    mock = FLAGS.index("--mock-data")
    flags = [*FLAGS[:mock], *FLAGS[mock + 1 :], "--data-path", "text", "--split", "1"]
    with Run(tmp_path, 2) as run:
        for rank in range(2):
            (node := tmp_path / f"node{rank}").mkdir()
            write_by_hand(node / "text", [[rank] * 20])
            run.start(rank, *flags, change=partial(os.chdir, node))
        assert set(run.statuses().values()) == {1}
        (line,) = run.errors()
        assert "data.text differs between ranks: rank 1 and rank 0 have different values (" in line
        assert line.endswith("give all nodes the same files")


def test_ranks_that_reach_the_store_but_not_each_other_end_the_run(waiting: dict[str, Run]) -> None:
    """As behind a firewall that opens one port."""
    run = waiting["apart"]
    assert run.statuses() == {0: 1, 1: 1}
    both = f"rank 0 [{platform.node()}] and rank 1 [{platform.node()}]"
    assert f"waiting for {both}: preflight, joining the process group for " in run.err(0)
    assert len(run.errors()) == 2
    for line in run.errors():
        stuck = re.search(rf"{re.escape(both)} stuck for (\d+) s", line)
        assert stuck, line
        assert 7 <= int(stuck[1]) < 120
        assert "last seen: preflight, joining the process group" in line
        assert "raise --distributed-timeout-minutes" in line


def test_links_in_words() -> None:
    hosts = [RankAddress(f"host{rank // 2}", 1, f"10.0.0.{rank}", "eth0") for rank in range(6)]
    rates = [10e9, 11e9, 10e9, 3e9, 12e9, 10e9]
    assert describe_rates("inside", rates) == "inside 10 GB/s per rank, at least 3 GB/s (rank 3)"
    assert slow_links("inside", rates, [1, 0, 3, 2, 5, 4], hosts) == [
        "a slow link inside: rank 3 [host1, eth0 10.0.0.3] receives 3 GB/s from rank 2 "
        "[host1, eth0 10.0.0.2], and ranks usually 10 GB/s"
    ]
    assert split_nodes(Mesh(nodes=3, local_ranks=2), hosts) == []
    assert split_nodes(Mesh(nodes=2, local_ranks=3), hosts) == [
        "ranks 0 and 2 are told to share node 0, but run on host0 and host1: LOCAL_WORLD_SIZE 3 is wrong",
        "ranks 3 and 4 are told to share node 1, but run on host1 and host2: LOCAL_WORLD_SIZE 3 is wrong",
    ]


@pytest.mark.parametrize(("world", "local"), [(4, 2), (4, 4), (3, 1), (6, 3)])
def test_in_every_ring_each_rank_sends_to_who_receives_from_it(world: int, local: int) -> None:
    for rank in range(world):
        for ring in rings_of(Mesh(nodes=world // local, local_ranks=local, rank=rank)):
            after, before = ring.neighbours(rank)
            assert ring.neighbours(after)[1] == rank
            assert ring.neighbours(before)[0] == rank
            assert after != rank
    assert Ring("of two", range(2)).neighbours(0) == (1, 1)


def test_the_interface_of_an_address_is_found_if_there_is_one() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == "?"
    assert ranges([0, 2, 3, 4, 9]) == "0, 2-4, 9"
