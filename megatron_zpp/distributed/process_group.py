"""Picks the device of this rank and holds the process group of a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.distributed.rendezvous import Rendezvous
from megatron_zpp.distributed.topology import Topology


def select_device(requested: str, topology: Topology) -> torch.device:
    """The device of this rank for --device auto, cpu or cuda. Takes no GPU memory.

    Raises ValueError when GPUs are asked for and missing, or fewer than this node's ranks.
    """
    count = torch.cuda.device_count()
    if requested == "cpu" or (requested == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise option_error("--device", requested, "torch sees no GPU here; use --device cpu")
    if topology.local_world_size > count:
        raise option_error(
            "--device",
            requested,
            f"{topology.local_world_size} ranks on this node but {count} GPUs; start at most {count}",
        )
    return torch.device("cuda", topology.local_rank)


def backend_of(config: DistributedConfig, device: torch.device) -> str:
    """The collective library of a run: --distributed-backend, or what suits the device."""
    return config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")


@contextmanager
def process_group(
    config: DistributedConfig, topology: Topology, device: torch.device, rendezvous: Rendezvous
) -> Iterator[None]:
    """Takes the device and joins the ranks that have met; leaves both at the end. One rank needs no group.

    Raises ValueError, with the interface that was to be used, for ranks that do not reach each other.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if topology.world_size == 1:
        yield
        return
    backend = backend_of(config, device)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("collectives", rendezvous.store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=config.timeout,
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        variable = f"{backend.upper()}_SOCKET_IFNAME"
        rank_address, told = rendezvous.addresses[topology.rank], os.environ.get(variable, "(not set)")
        raise option_error(
            variable,
            told,
            f"the ranks have met, but {backend} cannot join them ({one_line(error)}); it must name the "
            f"interface by which nodes reach each other: rank {topology.rank} was met by {rank_address}",
        ) from error
    yield
    dist.destroy_process_group()  # not after an error: that would wait for ranks that wait for this one


def barrier(topology: Topology) -> None:
    """Waits until every rank is here."""
    if topology.world_size > 1:
        dist.barrier()
