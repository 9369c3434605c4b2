"""The ranks of a run while they are connected: what they share, and who may save."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_zpp.config.root import Config
from megatron_zpp.distributed.process_group import process_group
from megatron_zpp.distributed.rank_addresses import Rendezvous
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.reporting.console import tell
from megatron_zpp.reporting.slow_work import slow_work
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.heartbeat import heartbeat, is_of_a_collective
from megatron_zpp.supervision.process import Process
from megatron_zpp.supervision.signals import StopSignals, stop_signals
from megatron_zpp.train.setup.device import Device

if TYPE_CHECKING:
    from megatron_zpp.storage.lease import Lease


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
    lease: "Lease | None" = None

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
    """See `join`; a single rank has nobody to join."""
    if topology.world_size == 1:
        with process_group(config.distributed, topology, device.device, rendezvous):
            activity.now("building", patient=True)
            yield []
        return
    from megatron_zpp.supervision.joining import join

    settings = config.shared_settings() | device.settings()
    with join(config.distributed, topology, device.device, rendezvous, settings, activity) as lines:
        activity.now("building", patient=True)
        yield lines


def _lease(
    save: str | None, topology: Topology, store: dist.Store, activity: Activity, say: Callable[[str], None]
) -> "AbstractContextManager[Lease | None]":
    """See `save_lease`; nothing is held without --save."""
    if save is None:
        return nullcontext()
    from megatron_zpp.train.setup.save_lease import save_lease

    return save_lease(save, topology, store, activity, say)
