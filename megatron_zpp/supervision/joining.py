"""How several ranks start once they are connected: they compare settings, join a group, try the network."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.distributed.agreement import check_agreement
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.nccl_sockets import SOCKETS, choose_nccl_sockets
from megatron_zpp.distributed.process_group import backend_of, process_group
from megatron_zpp.distributed.rank_addresses import Rendezvous
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.preflight import preflight

_NAMED = 0.8  # of the time-out: then the heartbeat names the ranks that hang, before collectives give up


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
    sockets = choose_nccl_sockets(backend_of(device), exchange, os.environ)
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
        yield [*sockets.lines, *lines]
