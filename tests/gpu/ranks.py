"""Runs a function on several ranks over NCCL; emulated nodes may share the GPUs of this machine."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_zpp.distributed.topology import Topology
from tests.zero.ranks import joined, started

GPUS = torch.cuda.device_count()


def largest_in_core(*grids: tuple[int, int]) -> list[Any]:
    """(nodes, ranks per node), nodes share the GPUs: the last that this machine can hold is `gpu_core`."""
    held = [grid for grid in grids if grid[1] <= GPUS]
    marks = {grid: [] if grid == held[-1] else [pytest.mark.gpu_long] for grid in held}
    lacking = [pytest.mark.skip(reason=f"needs more than {GPUS} GPUs")]
    return [pytest.param(*grid, marks=marks.get(grid, lacking)) for grid in grids]


def on_gpus(
    nodes: int, local: int, function: Callable[..., Any], *arguments: Any, share_one_gpu: bool = False
) -> list[Any]:
    """What `function(topology, *arguments)` returns on each rank, by rank; no tensors.

    Rank r has GPU r modulo the number of GPUs, as launch/emulate_nodes.sh has it. Ranks of different nodes
    talk over TCP, as NCCL takes them for different hosts. So do all ranks that `share_one_gpu`.
    """
    return started(nodes * local, _rank, local, share_one_gpu, function, arguments)


def _rank(
    rank: int,
    world: int,
    port: int,
    results: Any,
    environment: dict[str, str],
    local: int,
    share_one_gpu: bool,
    function: Callable,
    arguments: tuple,
) -> None:
    os.environ.update(environment)  # that of the server which forks is from an earlier test
    topology = Topology(rank, world, rank % local, local)
    if world > local or share_one_gpu:
        host = f"rank{rank}" if share_one_gpu else f"node{rank // local}"
        os.environ |= {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    device = torch.device("cuda", 0 if share_one_gpu else rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    call = partial(function, topology, *arguments)
    joined(port, topology, results, call, backend="nccl", device_id=device)
