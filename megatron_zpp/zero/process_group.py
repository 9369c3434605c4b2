"""Picks the device of this rank and holds the process group of a run."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_zpp.config.options import refusal
from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.zero.topology import Topology


def select_device(requested: str, topology: Topology) -> torch.device:
    """The device of this rank for --device auto, cpu or cuda. Takes no GPU memory.

    Raises ValueError when GPUs are asked for and missing, or fewer than this node's ranks.
    """
    count = torch.cuda.device_count()
    if requested == "cpu" or (requested == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise refusal("--device", requested, "torch sees no GPU here; use --device cpu")
    if topology.local_world_size > count:
        raise refusal(
            "--device",
            requested,
            f"{topology.local_world_size} ranks on this node but {count} GPUs; start at most {count}",
        )
    return torch.device("cuda", topology.local_rank)


@contextmanager
def process_group(
    config: DistributedConfig, topology: Topology, device: torch.device
) -> Iterator[dist.Store]:
    """Takes the device and joins the other ranks; leaves both at the end. One rank needs no group.

    Yields a store of keys and values that all ranks share: what they tell each other outside of collectives.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if topology.world_size == 1:
        yield dist.HashStore()
        return
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = topology.rank, topology.world_size
    store = _meet(topology, config)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("collectives", store),
        rank=rank,
        world_size=world_size,
        timeout=config.timeout,
        device_id=device if backend == "nccl" else None,
    )
    yield dist.PrefixStore("megatron_zpp", store)
    dist.destroy_process_group()  # not after an error: that would wait for ranks that wait for this one


def _meet(topology: Topology, config: DistributedConfig) -> dist.Store:
    """The store of a launcher's MASTER_ADDR and MASTER_PORT, once all ranks are there. Raises ValueError."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        socket.getaddrinfo(address, port)
        meeting = dist.rendezvous("env://", topology.rank, topology.world_size, timeout=config.timeout)
        return next(meeting)[0]
    except (OSError, dist.DistError) as error:
        raise refusal(
            "MASTER_ADDR and MASTER_PORT",
            (address, port),
            f"the ranks cannot meet there ({error}); rank 0 must be able to open this port, and all "
            f"{topology.world_size} ranks be there within --distributed-timeout-minutes "
            f"{config.distributed_timeout_minutes:g}",
        ) from None


def barrier(topology: Topology) -> None:
    """Waits until every rank is here."""
    if topology.world_size > 1:
        dist.barrier()
