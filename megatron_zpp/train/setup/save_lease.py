"""Ensures that only one run at a time saves to a directory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch.distributed as dist

from megatron_zpp.config.options import option_error
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.lease import SECONDS, Held, Lease
from megatron_zpp.storage.location import ObjectError, location
from megatron_zpp.supervision.activity import Activity

_ANSWER = timedelta(seconds=4 * SECONDS)  # for rank 0, which may itself wait for SECONDS


@contextmanager
def save_lease(
    save: str, topology: Topology, store: dist.Store, activity: Activity, say: Callable[[str], None]
) -> Iterator[Lease | None]:
    """Hold the lease of --save on rank 0 while the block runs. Yields the lease on rank 0, else None.

    Raises ValueError on all ranks if another live run holds it or the file system does not let rank 0 take
    it.
    """
    activity.now("takes the lease of --save", patient=True)
    lease: Lease | None = None
    if topology.rank == 0:
        problem: str | None = None
        try:
            lease = Lease(location(save), say)
        except OSError as error:
            problem = _refused(save, error)
        _of_all(store, topology).put("problem", problem)
    else:
        problem = _of_all(store, topology).get("problem")
    if problem:
        raise ValueError(problem)
    with lease or nullcontext():
        yield lease


def _refused(save: str, error: OSError) -> str:
    if isinstance(error, Held):
        fix = f"is in use by another run, {error}; end that one, or give each run its own --save"
    elif isinstance(error, ObjectError):
        fix = str(error.strerror)
    else:
        fix = f"{error.strerror} ({error.filename or save}); name a directory that can be written"
    return str(option_error("--save", save, fix))


def _of_all(store: dist.Store, topology: Topology) -> Exchange:
    return Exchange(store, topology, _ANSWER, "lease")
