"""NCCL's sockets: where ranks choose them, and how they agree."""

import os
import platform
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.nccl_network import (
    NcclSettings,
    Network,
    parse_conf,
    read_nccl_settings,
    read_network,
)
from megatron_zpp.distributed.nccl_sockets import (
    PER_THREAD,
    THREADS,
    RankReport,
    SocketChoice,
    agree,
    choose_nccl_sockets,
    objection_to,
)
from megatron_zpp.distributed.topology import Topology
from tests.zero.ranks import on_ranks

PORT = Network(active_ports=("mlx5_0 port 1",))
AWS = Network(vendors=(("eth0", "0x8086"), ("eth1", "0x1d0f")))
GOOGLE = Network(vendors=(("eth0", "0x1ae0"),))
PLUGIN = Network(plugin=True)


def told(**variables: str) -> NcclSettings:
    return read_nccl_settings(variables, root=Path("/nonexistent"), home=Path("/nonexistent"))


@pytest.mark.parametrize(
    ("settings", "network", "objection"),
    [
        ({}, Network(), None),
        ({"NCCL_SOCKET_NTHREADS": "4"}, Network(), "NCCL_SOCKET_NTHREADS is 4 (environment)"),
        ({"NCCL_NSOCKS_PERTHREAD": "1"}, Network(), "NCCL_NSOCKS_PERTHREAD is 1 (environment)"),
        ({"NCCL_NET": "IB"}, Network(), "NCCL_NET is IB (environment)"),
        ({"NCCL_NET": "socket"}, Network(), None),
        ({"NCCL_NET_PLUGIN": "aws-ofi"}, Network(), "NCCL_NET_PLUGIN is aws-ofi (environment)"),
        ({"NCCL_NET_PLUGIN": "none"}, PLUGIN, None),
        ({}, PLUGIN, "the network plugin libnccl-net.so is installed"),
        ({"NCCL_NET": "Socket"}, PLUGIN, None),
        ({}, PORT, "mlx5_0 port 1 is an active port of InfiniBand or RoCE"),
        ({"NCCL_IB_DISABLE": "1"}, PORT, None),
        ({}, AWS, "eth1 is a card by AWS, for which NCCL has numbers of its own"),
        ({"NCCL_NET": "Socket"}, GOOGLE, "eth0 is a card by Google, for which NCCL has numbers of its own"),
    ],
)
def test_auto_chooses_only_where_nccl_would_use_tcp_with_one_socket(
    settings: Mapping[str, str], network: Network, objection: str | None
) -> None:
    assert objection_to(2, told(**settings), network, 1024) == objection


def test_open_files_are_counted() -> None:
    assert objection_to(2, told(), Network(), 856) is None
    assert objection_to(2, told(), Network(), None) is None
    objection = "sockets to 1 other nodes need about 856 open files, and ulimit -n is 855"
    assert objection_to(2, told(), Network(), 855) == objection


def test_nccl_conf_is_read_as_nccl_reads_it(tmp_path: Path) -> None:
    """Literally, the first of several values, and each file after the environment."""
    assert parse_conf("# NCCL_A=1\nNCCL_B=2\nno value\nNCCL_C==x y\n NCCL_D=4\nNCCL_B=3\nNCCL_E=") == {
        "NCCL_B": "2",
        "NCCL_C": "=x y",
        " NCCL_D": "4",
        "NCCL_E": "",
    }
    home, etc, other = tmp_path / "home", tmp_path / "etc", tmp_path / "other.conf"
    home.mkdir()
    etc.mkdir()
    (etc / "nccl.conf").write_text("NCCL_NET=IB\nNCCL_IB_DISABLE=1\nNCCL_NSOCKS_PERTHREAD=8\n")
    (home / ".nccl.conf").write_bytes(b"NCCL_NET=Socket\nNCCL_X=\xff\n")
    other.write_text("NCCL_IB_DISABLE=0\n")
    settings = read_nccl_settings({"NCCL_NSOCKS_PERTHREAD": "", "PATH": "x"}, tmp_path, home)
    assert settings.describe("NCCL_NET") == f"NCCL_NET is Socket ({home / '.nccl.conf'})"
    assert settings.describe("NCCL_IB_DISABLE") == f"NCCL_IB_DISABLE is 1 ({etc / 'nccl.conf'})"
    assert settings.get("NCCL_NSOCKS_PERTHREAD") is None  # what is set, if to nothing, is not set again
    assert settings.get("PATH") is None
    settings = read_nccl_settings({"NCCL_CONF_FILE": str(other)}, tmp_path, home)
    assert settings.describe("NCCL_NET") == f"NCCL_NET is IB ({etc / 'nccl.conf'})"
    assert settings.describe("NCCL_IB_DISABLE") == f"NCCL_IB_DISABLE is 0 ({other})"
    nowhere = {"NCCL_CONF_FILE": str(tmp_path / "absent")}
    assert read_nccl_settings(nowhere, tmp_path / "absent", home).get("NCCL_NET") is None
    os.mkfifo(home / "fifo")
    assert read_nccl_settings({"NCCL_CONF_FILE": str(home / "fifo")}, home, home).get("NCCL_NET") is None


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_the_network_of_a_machine_is_read(tmp_path: Path) -> None:
    assert read_network(tmp_path, lambda library: False) == Network()
    assert read_network(tmp_path, lambda library: library == "libnccl-net.so").plugin
    put(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    put(tmp_path, "sys/class/infiniband/mlx5_1/ports/2/state", "4: ACTIVE\n")
    put(tmp_path, "sys/class/net/eth0/device/vendor", "0x1d0f\n")
    (tmp_path / "sys/class/net/lo").mkdir()
    found = read_network(tmp_path, lambda library: False)
    assert found == Network(("mlx5_1 port 2",), (("eth0", "0x1d0f"),))
    assert isinstance(read_network(), Network)  # this machine


def agreed(*reports: tuple[str | None, str, str]) -> SocketChoice:
    """What all do by an objection, the host and the mask of cores of each rank."""
    return agree([RankReport(*report) for report in reports])


def test_one_rank_that_objects_keeps_all_from_choosing() -> None:
    assert agreed((None, "a", "ff"), (None, "b", "ff")) == SocketChoice(
        True, "NCCL uses TCP and would have one socket"
    )
    assert agreed(("x", "a", "ff"), ("x", "b", "ff")) == SocketChoice(False, "x")
    choice = agreed((None, "a", "ff"), ("x", "b", "ff"))
    assert choice == SocketChoice(False, "x [rank 1 on b]")
    assert choice.lines == [" NCCL's sockets: left to NCCL, because x [rank 1 on b]"]


def test_cores_are_those_that_no_other_rank_of_the_host_uses() -> None:
    assert agreed((None, "a", "f"), (None, "a", "f0"), (None, "b", "f")).chosen
    assert agreed((None, "a", "ff"), (None, "a", "ff"), (None, "b", "ff")).chosen
    choice = agreed((None, "b", "ff"), *3 * [(None, "a", "ff")])
    assert choice == SocketChoice(False, "rank 1 on a has 2.67 cores, and threads for sockets pay from 4 on")


def chosen(topology: Topology, cases: list[tuple[str, int, dict[str, str]]]) -> list[tuple[list[str], str]]:
    """A rank's messages and environment after each case; a real store, and a machine of 64 cores."""
    os.sched_getaffinity = lambda process: set(range(64))  # type: ignore[assignment]
    store, found = dist.distributed_c10d._get_default_store(), []
    for number, (backend, local, third) in enumerate(cases):
        environment = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"} | (
            third if topology.rank == 2 else {}
        )
        nodes = Topology(topology.rank, topology.world_size, topology.rank % local, local)
        exchange = Exchange(store, nodes, timedelta(seconds=60), f"test {number}")
        lines = choose_nccl_sockets(backend, exchange, environment).lines
        set_to = " ".join(environment[name] for name in (THREADS, PER_THREAD) if name in environment)
        found.append((lines, set_to))
    return found


def test_ranks_agree_over_the_store() -> None:
    """Four ranks, of which the third may have another environment: all decide alike."""
    tcp = "2 threads × 2 sockets per connection, because NCCL uses TCP and would have one socket"
    left = f"left to NCCL, because NCCL_NET is IB (environment) [rank 2 on {platform.node()}]"
    cases = [("nccl", 2, {}), ("nccl", 1, {"NCCL_NET": "IB"}), ("nccl", 4, {}), ("gloo", 2, {})]
    expected = [([f" NCCL's sockets: {tcp}"], "2 2"), ([f" NCCL's sockets: {left}"], ""), ([], ""), ([], "")]
    assert on_ranks(4, chosen, cases) == [expected] * 4
