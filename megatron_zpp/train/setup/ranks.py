"""The ranks of a run while they are connected: how they join, what they share, and who may save."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from megatron_zpp.config.options import option_error
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.agreement import check_agreement
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.nccl_sockets import SOCKETS, choose_nccl_sockets
from megatron_zpp.distributed.process_group import backend_of, process_group
from megatron_zpp.distributed.rank_addresses import Rendezvous
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.reporting.console import tell
from megatron_zpp.reporting.slow_work import slow_work
from megatron_zpp.storage.lease import LEASE, SECONDS, Held, Lease
from megatron_zpp.storage.location import location
from megatron_zpp.storage.object_errors import ObjectError
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.heartbeat import heartbeat, is_of_a_collective
from megatron_zpp.supervision.preflight import preflight
from megatron_zpp.supervision.process import Process
from megatron_zpp.supervision.signals import StopSignals, stop_signals
from megatron_zpp.train.setup.device import Device

_NAMED = 0.8  # of the time-out: then the heartbeat names the ranks that hang, before collectives give up


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What one rank has of all ranks of its run.

    `store` is what all ranks share besides their collectives. A signal in `signals` ends the run early.
    `activity` is told what this rank is doing. `lines`, for the log, say how the ranks joined. `lease`, on
    rank 0, is that of --save.
    """

    topology: Topology
    store: dist.Store
    signals: StopSignals
    activity: Activity
    lines: tuple[str, ...] = ()
    lease: Lease | None = None

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        """Tell the other ranks of an error in this block before what surrounds it ends.

        Logs that hang and a lease whose storage does not answer take a minute to close. Meanwhile a launcher,
        whose other ranks have ended, may ask this one to stop, which means nothing any more. If a collective
        failed, another rank may be the cause, and `heartbeat` finds out which.
        """
        try:
            yield
        except BaseException as error:
            if not is_of_a_collective(error):
                self.signals.finish()
                self.activity.tell_error(error)
            raise


@contextmanager
def joined_ranks(process: Process, config: Config, device: Device) -> Iterator[Ranks]:
    """Join all ranks while the block runs: signals, error lines, heartbeat, process group, lease of --save.

    An error in the block, or in joining, ends the process with one line; see `one_line_errors`.
    """
    prog, topology, save = process.prog, process.topology, config.checkpoint.save
    rendezvous = process.connect(config.distributed)
    store, timeout = rendezvous.store, config.distributed.heartbeat_timeout
    with (
        stop_signals(prog, topology, process.per_node, saves=save is not None) as signals,
        process.shared_errors(),
        heartbeat(store, topology, timeout, prog, signals.told_to_stop, rendezvous.lifelines) as activity,
        _joined(config, topology, device, rendezvous, activity) as lines,
        _lease(save, topology, store, activity, partial(tell, prog)) as lease,
        slow_work(lambda: (activity.latest.text, activity.latest.patient), partial(tell, prog))
        if topology.rank == 0
        else nullcontext(),
    ):
        ranks = Ranks(
            topology=topology,
            store=store,
            signals=signals,
            activity=activity,
            lines=tuple(lines),
            lease=lease,
        )
        with ranks.errors_told():
            yield ranks


@contextmanager
def _joined(
    config: Config, topology: Topology, device: Device, rendezvous: Rendezvous, activity: Activity
) -> Iterator[list[str]]:
    """Hold a process group while the block runs, after the ranks compared settings and tried the network.

    Yields lines for the log. Raises ValueError on all ranks, naming the problem and its rank.
    """
    distributed, place = config.distributed, device.device
    limit = _NAMED * distributed.timeout.total_seconds()
    exchange = Exchange(rendezvous.store, topology, distributed.timeout, "preflight")
    activity.now("preflight, comparing settings", limit=limit)
    launched = {"launcher": {"LOCAL_WORLD_SIZE": topology.local_world_size}}
    fix = "start all ranks with the same flags, and the same number of ranks on every node"
    check_agreement(config.shared_settings() | device.settings() | launched, exchange, fix)
    sockets = choose_nccl_sockets(backend_of(place), exchange, os.environ)
    activity.now("preflight, joining the process group", limit=limit)
    with process_group(distributed, topology, place, rendezvous):
        through = SOCKETS if sockets.chosen else ""
        lines = preflight(rendezvous, place, exchange, activity, limit=limit, sockets=through)
        del exchange  # closes its connections to the store
        activity.now("building", patient=True)
        yield [*sockets.lines, *lines]


@contextmanager
def _lease(
    save: str | None, topology: Topology, store: dist.Store, activity: Activity, say: Callable[[str], None]
) -> Iterator[Lease | None]:
    """Hold the lease of --save on rank 0 while the block runs, so that only one run at a time saves there.

    Yields the lease on rank 0, else None; nothing is held without --save. Raises ValueError on all ranks if
    another live run holds it or the file system does not let rank 0 take it.
    """
    if save is None:
        yield None
        return
    activity.now("takes the lease of --save", patient=True)
    lease: Lease | None = None
    problem: str | None = None
    # Rank 0 may itself wait for SECONDS.
    exchange = Exchange(store, topology, timedelta(seconds=4 * SECONDS), "lease")
    if topology.rank == 0:
        try:
            lease = Lease(location(save), say)
        except OSError as error:
            problem = _refused(save, error)
        exchange.put("problem", problem)
    problem = exchange.get("problem")
    del exchange  # closes its connection to the store
    if problem:
        raise ValueError(problem)
    with lease or nullcontext():
        yield lease


def _refused(save: str, error: OSError) -> str:
    if isinstance(error, Held):
        copied = f"in a copy of its directory, remove {LEASE}"
        fix = f"is in use by another run, {error}; end that one, or give each run its own --save; {copied}"
    elif isinstance(error, ObjectError):
        fix = str(error.strerror)
    else:
        fix = f"{error.strerror} ({error.filename or save}); name a directory that can be written"
    return str(option_error("--save", save, fix))
