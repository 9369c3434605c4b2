"""What ranks tell each other about one save or load, outside of collectives and from any thread."""

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_zpp.distributed.topology import Topology

_FIRST_POLL, _LAST_POLL = 0.005, 0.5  # seconds; each is half as long again as the one before
_REPORT_EVERY = 1.0  # seconds, at most: between two reports of progress by one rank, and two looks at them


class NoProgress(TimeoutError):
    """A rank was waited for, and no rank reported progress for the whole time-out."""


class Abandoned(RuntimeError):
    """Another rank has given up what this exchange is about; the message is its reason."""


class Exchange:
    """JSON values under names, in a store that all ranks share.

    `purpose` keeps the names of one save or load apart from those of others: every rank must make its
    exchanges with the same ones. Waiting lasts as long as some rank reports progress: `timeout` is how long
    none may.
    """

    def __init__(self, store: dist.Store, topology: Topology, timeout: timedelta, purpose: str) -> None:
        self.topology, self.timeout, self._purpose = topology, timeout, purpose
        # A connection of its own: a call on a store blocks all other threads that use the same connection.
        self._store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self._reports: dist.Store | None = None  # a connection of its own, where `progress` is slow enough
        self._reported = time.monotonic()
        self._every = min(_REPORT_EVERY, timeout.total_seconds() / 8)

    def put(self, name: str, value: Any) -> None:
        """Says a value to all ranks, once."""
        self._store.set(self._key(name), json.dumps(value))

    def get(self, name: str) -> Any:
        """The value that some rank says.

        Raises NoProgress when none does, and none reports progress, for the time-out; Abandoned when a rank
        has given up.
        """
        key, poll = self._key(name), _FIRST_POLL
        seen, looked = None, time.monotonic()
        deadline = looked + self.timeout.total_seconds()
        while not self._store.check([key]):
            now = time.monotonic()
            if now - looked > self._every or now > deadline:
                looked = now
                self._raise_if_abandoned()
                if seen != (seen := self._store.add(self._key("progress"), 0)):
                    deadline = now + self.timeout.total_seconds()
            if now > deadline:
                raise NoProgress(f"no rank said {key!r} or reported progress for {self.timeout}")
            time.sleep(poll)
            poll = min(_LAST_POLL, 1.5 * poll)
        return json.loads(self._store.get(key))

    def pop(self, name: str) -> Any:
        """Like `get`, for a value that is said to this rank alone."""
        value = self.get(name)
        self._store.delete_key(self._key(name))
        return value

    def gather(self, name: str) -> list[Any]:
        """On rank 0: what every rank says as `name`/RANK, by rank. NoProgress names the rank."""
        values = []
        for rank in range(self.topology.world_size):
            try:
                values.append(self.pop(f"{name}/{rank}"))
            except NoProgress:
                raise NoProgress(f"rank {rank} reported no progress for {self.timeout}") from None
        return values

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """What each rank says, by rank; this one says `value`. Rank 0 collects it for all."""
        self.put(f"{name}/{self.topology.rank}", value)
        if self.topology.rank == 0:
            self.put(name, self.gather(name))
        return self.get(name)

    def progress(self) -> None:
        """Reports that this rank gets on; to be called often, and by any thread: most calls do nothing."""
        now = time.monotonic()
        if now - self._reported > self._every:
            self._reported = now
            self._reports = self._reports or self._store.clone()
            self._reports.add(self._key("progress"), 1)

    def abandon(self, reason: str) -> str | None:
        """Gives up for all ranks. Returns the reason that counts, the first; None after a `commit`."""
        return self._decide(reason)

    def commit(self) -> str | None:
        """Decides for all ranks to go through with it. Returns why not, where one of them has given up."""
        return self._decide(None)

    def _decide(self, reason: str | None) -> str | None:
        """The first decision of any rank, in the store: null to commit, else the reason to abandon."""
        return json.loads(self._store.compare_set(self._key("decision"), "", json.dumps(reason)))

    def _raise_if_abandoned(self) -> None:
        if self._store.check([self._key("decision")]):
            reason = json.loads(self._store.get(self._key("decision")))
            if reason is not None:
                raise Abandoned(reason)

    def _key(self, name: str) -> str:
        return f"{self._purpose}/{name}"
