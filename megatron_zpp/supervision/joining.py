"""How ranks start: they connect, compare settings, join a process group and try the network."""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.distributed.agreement import check_agreement
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.job_store import VARIABLE as SECRET
from megatron_zpp.distributed.nccl_sockets import SOCKETS, choose_nccl_sockets
from megatron_zpp.distributed.process_group import backend_of, process_group
from megatron_zpp.distributed.rendezvous import Rendezvous, rendezvous
from megatron_zpp.distributed.slurm import launcher_variables
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.errors import end_at_once
from megatron_zpp.supervision.preflight import preflight

_NAMED = 0.8  # of the time-out: then the heartbeat names the ranks that hang, before collectives give up


def connect_ranks(config: DistributedConfig, topology: Topology, prog: str) -> Rendezvous:
    """Connect to the store that the launcher names and wait for all ranks; stderr says which are missing.

    From then on a rank that was killed ends this process too, with a line.
    """

    def say(line: str) -> None:
        if topology.local_rank == 0:
            sys.stderr.write(f"{prog} [{platform.node()} rank {topology.rank}]: {line}\n")

    def ended(text: str) -> None:
        end_at_once(prog, topology, f"error: {text}", 1)

    met = rendezvous(topology, launcher_variables(os.environ), config.timeout, say=say, ended=ended)
    os.environ.pop(SECRET, None)  # workers of data loaders and programs such as that of W&B need none
    return met


@contextmanager
def join(
    config: DistributedConfig,
    topology: Topology,
    device: torch.device,
    rendezvous: Rendezvous,
    settings: dict[str, dict[str, Any]],
    activity: Activity,
) -> Iterator[list[str]]:
    """Hold a process group while the block runs, after the ranks compared `settings` and tried the network.

    Yields lines for the log. Raises ValueError on all ranks, naming the problem and its rank.
    """
    limit = _NAMED * config.timeout.total_seconds()
    exchange = Exchange(rendezvous.store, topology, config.timeout, "preflight")
    activity.now("preflight, comparing settings", limit=limit)
    check_agreement(settings, exchange)
    sockets = choose_nccl_sockets(backend_of(config, device), exchange, os.environ)
    activity.now("preflight, joining the process group", limit=limit)
    with process_group(config, topology, device, rendezvous):
        lines = preflight(
            rendezvous,
            device,
            exchange,
            activity,
            limit=limit,
            sockets=SOCKETS if sockets.chosen else "",
        )
        del exchange  # closes its connections to the store
        activity.now("building", patient=True)
        yield [*sockets.lines, *lines]
