"""Selects the device of this rank, and opens and closes the process group of a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob

import torch
import torch.distributed as dist

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.distributed.job_store import of_torch
from megatron_zpp.distributed.rank_addresses import Rendezvous
from megatron_zpp.distributed.topology import Topology

_GPUS = "/dev/nvidia[0-9]*"  # those of a cgroup that this process is not in cannot be read


def select_device(requested: str, topology: Topology) -> torch.device:
    """Return the device of this rank for --device auto, cpu or cuda. Allocates no GPU memory.

    Raises ValueError if there are no GPUs for --device cuda, fewer GPUs than ranks on this node, or for auto
    a GPU that torch does not see, unless CUDA_VISIBLE_DEVICES hides all.
    """
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").startswith((*"0123456789", "GPU-", "MIG-"))
    unseen = [path for path in glob(_GPUS) if visible and os.access(path, os.R_OK)]
    if requested == "auto" and count == 0 and unseen:
        fix = f"torch {torch.__version__} does not see {unseen[0]}; install torch for its driver, or use cpu"
        raise option_error("--device", requested, fix)
    if requested == "cpu" or (requested == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise option_error("--device", requested, "torch sees no GPU here; use --device cpu")
    if topology.local_world_size > count:
        fix = f"{topology.local_world_size} ranks on this node but {count} GPUs; start at most {count}"
        raise option_error("--device", requested, fix)
    return torch.device("cuda", topology.local_rank)


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


@contextmanager
def process_group(
    config: DistributedConfig, topology: Topology, device: torch.device, rendezvous: Rendezvous
) -> Iterator[None]:
    """Select the device and create the process group of all ranks; destroy the group at the end.

    A single rank has no group. Raises ValueError, naming the network interface, if ranks cannot connect.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if topology.world_size == 1:
        yield
        return
    backend = backend_of(device)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("collectives", of_torch(rendezvous.store)),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=config.timeout,
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        variable = f"{backend.upper()}_SOCKET_IFNAME"
        fix = (
            f"the ranks share a store, but {backend} cannot connect them ({one_line(error)}); must name the "
            f"interface that nodes use to reach each other: rank {topology.rank} reached the store from "
            f"{rendezvous.own}"
        )
        raise option_error(variable, os.environ.get(variable, "(not set)"), fix) from error
    yield
    dist.destroy_process_group()  # not after an error: it would wait for ranks that wait for this one
