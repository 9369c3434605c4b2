"""What ranks tell each other about one save or load, outside of collectives and from any thread."""

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_zpp.zero.topology import Topology

_POLL = 0.02  # seconds


class Exchange:
    """JSON values under names, in a store that all ranks share.

    `purpose` keeps the names of one save or load apart from those of others: every rank must make its
    exchanges with the same ones.
    """

    def __init__(self, store: dist.Store, topology: Topology, timeout: timedelta, purpose: str) -> None:
        self.topology, self._timeout, self._purpose = topology, timeout, purpose
        self._store = store.clone()  # a store's call keeps other threads of the same one waiting

    def tell(self, name: str, value: Any) -> None:
        """Says a value to all ranks, once."""
        self._store.set(f"{self._purpose}/{name}", json.dumps(value))

    def hear(self, name: str) -> Any:
        """The value that some rank says. Raises TimeoutError when none does in time."""
        key, deadline = f"{self._purpose}/{name}", time.monotonic() + self._timeout.total_seconds()
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no rank said {key!r} within {self._timeout}")
            time.sleep(_POLL)
        return json.loads(self._store.get(key))

    def take(self, name: str) -> Any:
        """Like `hear`, for a value that is said to this rank alone."""
        value = self.hear(name)
        self._store.delete_key(f"{self._purpose}/{name}")
        return value

    def everyone(self, name: str, value: Any) -> list[Any]:
        """What each rank says, by rank; this one says `value`. Rank 0 collects it for all."""
        self.tell(f"{name}/{self.topology.rank}", value)
        if self.topology.rank == 0:
            self.tell(name, [self.take(f"{name}/{rank}") for rank in range(self.topology.world_size)])
        return self.hear(name)
