"""--nccl-sockets: when `auto` chooses, what refuses numbers, how ranks agree, and what a run says."""

import os
import platform
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.nccl_network import (
    NcclSettings,
    Network,
    may_use,
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
    auto_objection,
    choose_nccl_sockets,
    cores_of_ranks,
    explicit_objection,
    files_needed,
)
from megatron_zpp.distributed.topology import Topology
from tests.support import Run
from tests.zero.ranks import on_ranks

PORT = Network(active_ports=("mlx5_0 port 1",))
AWS = Network(vendors=(("eth0", "0x8086"), ("eth1", "0x1d0f")))
GOOGLE = Network(vendors=(("eth0", "0x1ae0"),))
PLUGIN = Network(plugin=True)
FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 50 --num-layers 1 --hidden-size 16 "
    "--num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --eval-iters 0 "
    "--num-workers 0 --device cpu --log-interval 1"
).split()


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
    assert auto_objection(2, told(**settings), network, 1024) == objection


def test_open_files_are_counted() -> None:
    assert files_needed((2, 2), 2) == 2 * 2 * (4 + 1) * 6 * 5 + 256
    assert auto_objection(2, told(), Network(), 856) is None
    assert auto_objection(2, told(), Network(), None) is None
    objection = "sockets to 1 other nodes need about 856 open files, and ulimit -n is 855"
    assert auto_objection(2, told(), Network(), 855) == objection
    refused = explicit_objection((2, 2), 2, told(), 855)
    assert refused == f"{objection}; raise the hard limit (ulimit -Hn), or give fewer sockets"
    assert files_needed((2, 2), 128) < 2**14


@pytest.mark.parametrize(
    ("settings", "objection"),
    [
        ({}, None),
        ({"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "0x2"}, None),
        ({"NCCL_NET": "Socket"}, None),
        ({"NCCL_SOCKET_NTHREADS": "2"}, "NCCL_SOCKET_NTHREADS is 2 (environment); unset one of them"),
        ({"NCCL_NSOCKS_PERTHREAD": "x"}, "NCCL_NSOCKS_PERTHREAD is x (environment); unset one of them"),
        (
            {"NCCL_NET": "IB"},
            "NCCL_NET is IB (environment), and only Socket has these numbers; unset one of them",
        ),
    ],
)
def test_given_numbers_are_refused_only_where_something_contradicts_them(
    settings: Mapping[str, str], objection: str | None
) -> None:
    assert explicit_objection((4, 2), 2, told(**settings), 2048) == objection


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("4", "must be auto, off or THREADSxSOCKETS, such as 2x2"),
        ("2x2\n", "must be auto, off or THREADSxSOCKETS, such as 2x2"),
        ("17x1", "NCCL has at most 16 threads per connection; give 16x1 or less"),
        ("8x9", "makes 72 sockets per connection, and NCCL has at most 64; give 8x8 or less"),
    ],
)
def test_values_that_nccl_cannot_have_are_refused(value: str, fix: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'--nccl-sockets {value}: {fix}')}$"):
        DistributedConfig(nccl_sockets=value)


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
    assert read_network(told(), tmp_path, lambda library: False) == Network()
    assert read_network(told(), tmp_path, lambda library: library == "libnccl-net.so").plugin
    put(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    put(tmp_path, "sys/class/infiniband/mlx5_1/ports/2/state", "4: ACTIVE\n")
    put(tmp_path, "sys/class/net/eth0/device/vendor", "0x1d0f\n")
    put(tmp_path, "sys/class/net/docker0/device/vendor", "0x1ae0\n")
    (tmp_path / "sys/class/net/lo").mkdir()
    found = read_network(told(), tmp_path, lambda library: False)
    assert found == Network(("mlx5_1 port 2",), (("eth0", "0x1d0f"),))
    assert read_network(told(NCCL_SOCKET_IFNAME="lo"), tmp_path, lambda library: False).vendors == ()
    assert isinstance(read_network(told()), Network)  # this machine


@pytest.mark.parametrize(
    ("interface", "wanted", "admitted"),
    [
        ("eth0", None, True),
        ("lo", None, False),
        ("docker0", None, False),
        ("eth0", "eth", True),
        ("ib0", "eth,ib", True),
        ("eth0", "=eth", False),
        ("eth0", "=eth0", True),
        ("eth0", "^eth", False),
        ("lo", "^eth", True),
        ("eth0", "^=eth", True),
        ("eth1", "eth1:5000,eth2", True),
        ("eth3", "eth1:5000,eth2", False),
    ],
)
def test_interfaces_are_those_that_nccl_may_use(interface: str, wanted: str | None, admitted: bool) -> None:
    assert may_use(interface, wanted) == admitted


def report(objection: str | None = None, host: str = "a", cores: str = "ff") -> RankReport:
    return RankReport(objection, host, cores)


def test_one_rank_that_objects_keeps_all_from_choosing() -> None:
    assert agree("auto", [report(), report(host="b")]) == SocketChoice(
        (2, 2), "NCCL uses TCP and would have one socket (--nccl-sockets auto)"
    )
    assert agree("auto", [report("x"), report("x", "b")]) == SocketChoice(None, "x")
    choice = agree("auto", [report(), report("x", "b")])
    assert choice == SocketChoice(None, "x [rank 1 on b]")
    assert choice.environment() == {}
    assert choice.lines() == [" NCCL's sockets: left to NCCL, because x [rank 1 on b]"]


def test_given_numbers_are_set_or_refused_for_all() -> None:
    choice = agree("4x2", [report(cores="1"), report(cores="1")])
    assert choice.environment() == {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2"}
    assert choice.lines() == [
        " NCCL's sockets: 4 threads × 2 sockets per connection, because of --nccl-sockets 4x2"
    ]
    with pytest.raises(ValueError, match=r"^--nccl-sockets 4x2: x; unset \[rank 1 on b\]$"):
        agree("4x2", [report(), report("x; unset", "b")])


def test_cores_are_those_that_no_other_rank_of_the_host_uses() -> None:
    apart = [report(cores="f"), report(cores="f0"), report(host="b", cores="f")]
    assert cores_of_ranks(apart) == [4, 4, 4]
    assert cores_of_ranks([report(), report(), report(host="b")]) == [4, 4, 8]
    assert agree("auto", apart).sockets == (2, 2)
    choice = agree("auto", [report(host="b"), report(), report(), report()])
    assert choice == SocketChoice(None, "rank 1 on a has 2.67 cores, and threads for sockets pay from 4 on")


def chosen(
    topology: Topology, value: str, backend: str, environments: list[dict[str, str]]
) -> tuple[list[str], str]:
    """A rank's messages and environment afterwards; a real store, and a machine of 64 cores."""
    os.sched_getaffinity = lambda process: set(range(64))  # type: ignore[assignment]
    environment = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"} | environments[topology.rank]
    store = dist.distributed_c10d._get_default_store()
    exchange = Exchange(store, topology, timedelta(seconds=60), "test")
    try:
        lines = choose_nccl_sockets(value, backend, exchange, environment).lines()
    except ValueError as error:
        lines = [str(error)]
    return lines, " ".join(environment[name] for name in (THREADS, PER_THREAD) if name in environment)


AGREED = {
    "auto nccl 2": (
        {},
        " NCCL's sockets: 2 threads × 2 sockets per connection, because NCCL uses TCP and would have one "
        "socket (--nccl-sockets auto)",
        "2 2",
    ),
    "auto nccl 1": (
        {"NCCL_NET": "IB"},
        " NCCL's sockets: left to NCCL, because NCCL_NET is IB (environment) [rank 2 on HOST]",
        "",
    ),
    "auto nccl 4": ({}, None, ""),
    "auto gloo 2": ({}, None, ""),
    "off nccl 2": ({}, " NCCL's sockets: left to NCCL, because of --nccl-sockets off", ""),
    "3x4 nccl 4": (
        {},
        " NCCL's sockets: 3 threads × 4 sockets per connection, because of --nccl-sockets 3x4",
        "3 4",
    ),
    "3x4 nccl 2": (
        {"NCCL_NET": "IB"},
        "--nccl-sockets 3x4: NCCL_NET is IB (environment), and only Socket has these numbers; unset one of "
        "them [rank 2 on HOST]",
        "",
    ),
    "3x4 gloo 2": (
        {},
        "--nccl-sockets 3x4: needs --distributed-backend nccl, and this run uses gloo; omit it",
        "",
    ),
}


@pytest.mark.parametrize("case", AGREED)
def test_ranks_agree_over_the_store(case: str) -> None:
    """Four ranks, of which the third may have another environment: all decide alike."""
    value, backend, per_node = case.split()
    third, line, numbers = AGREED[case]
    results = on_ranks(4, chosen, value, backend, [{}, {}, third, {}], ranks_per_node=int(per_node))
    lines = [line.replace("HOST", platform.node())] if line else []
    assert results == 4 * [(lines, numbers)]


def test_runs_over_gloo_say_nothing_of_sockets_and_refuse_numbers(tmp_path: Path) -> None:
    """Two emulated nodes; the first run takes the default."""
    runs = {"default": [], "numbers": ["--nccl-sockets", "2x2"]}
    for name, more in runs.items():
        with Run(tmp_path / name, 2) as run:
            for rank in range(2):
                run.start(rank, *FLAGS, *more, LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
            statuses = run.statuses()
            if more:
                assert statuses == {0: 1, 1: 1}
                (line,) = run.errors()
                assert (
                    "error: --nccl-sockets 2x2: needs --distributed-backend nccl, and this run uses" in line
                )
                continue
            assert statuses == {0: 0, 1: 0}, run.err(0)
            (line,) = (line for line in run.out(0).splitlines() if line.startswith(" preflight: 2 ranks in "))
            assert " GB/s per rank, at least " in line.partition("between nodes ")[2]
            assert "socket" not in run.out(0)
