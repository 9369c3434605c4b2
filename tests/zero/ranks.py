"""Runs a function on several ranks, as processes of this machine over gloo."""

import faulthandler
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.distributed.topology import Topology
from tests.forkserver import CONTEXT


def on_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, ranks_per_node: int | None = None
) -> list[Any]:
    """What `function(topology, *arguments)` returns on each of `world` ranks, by rank; no tensors, as these
    would be shared with a process that has ended.
    """
    if world == 1:
        return [function(Topology(), *arguments)]
    return started(world, _rank, ranks_per_node or world, function, arguments)


def started(world: int, target: Callable[..., None], *arguments: Any) -> list[Any]:
    """What processes of `target(rank, world, port, results, environment, *arguments)` put, by rank."""
    results = CONTEXT.SimpleQueue()
    rendezvous = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # at a port that is free
    processes = mp.start_processes(
        target,
        (world, rendezvous.port, results, dict(os.environ), *arguments),
        nprocs=world,
        join=False,
        start_method="forkserver",
    )
    collected = {}
    while not processes.join(timeout=0.05) or not results.empty():
        while not results.empty():  # a long result is written as it is read
            rank, result = results.get()
            collected[rank] = result
    return [collected[rank] for rank in range(world)]


def joined(port: int, topology: Topology, results: Any, call: Callable[[], Any], **group: Any) -> None:
    """Put the rank and what `call` returns in a process group of these settings."""
    faulthandler.enable()  # a crash in native code says where
    ranks = {"rank": topology.rank, "world_size": topology.world_size}
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(store=store, **ranks, **group)
    results.put((topology.rank, call()))
    dist.barrier()
    dist.destroy_process_group()


def _rank(
    rank: int,
    world: int,
    port: int,
    results: Any,
    environment: dict[str, str],
    per_node: int,
    function: Callable,
    arguments: tuple,
) -> None:
    os.environ.update(environment)  # that of the server which forks is from an earlier test
    torch.set_num_threads(1)
    topology = Topology(rank, world, rank % per_node, per_node)
    joined(port, topology, results, partial(function, topology, *arguments), backend="gloo")


class SharedMemoryStream(CommStream):
    """A communication stream with peer buffers, between processes of this machine."""

    @property
    def writes_peers(self) -> bool:
        """See CommStream."""
        return True

    def peer_buffers(self, nbytes: int) -> list[Tensor]:
        """See CommStream."""
        directory = [tempfile.mkdtemp()]
        dist.broadcast_object_list(directory, src=self.ranks[0], group=self._group)
        self._barrier_buffers = torch.zeros(len(self.ranks)), torch.zeros(len(self.ranks))
        files = (str(Path(directory[0], str(group_rank))) for group_rank in range(len(self.ranks)))
        return [torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8) for file in files]
