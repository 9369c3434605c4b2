"""Exchanges JSON values between ranks through the store: outside of collectives, and from any thread."""

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_zpp.distributed.topology import Topology

_FIRST_POLL, _LAST_POLL = 0.005, 0.5  # seconds; each interval is 1.5 times the previous one
_REPORT_EVERY = 1.0  # seconds, at most, between reports of progress by a rank, and between checks for them


class NoProgress(TimeoutError):
    """The expected value did not arrive, and no rank reported progress for the whole time-out."""


class Abandoned(RuntimeError):
    """Another rank has abandoned the operation of this exchange; the message is its reason."""


class Exchange:
    """JSON values by name, in a store that all ranks share, for one operation such as a save or load.

    `purpose` separates the names of one operation from those of others; every rank must use the same
    purposes. A wait continues for as long as some rank reports progress, and fails after `timeout` without
    any.
    """

    def __init__(self, store: dist.Store, topology: Topology, timeout: timedelta, purpose: str) -> None:
        self.topology, self.timeout, self._purpose = topology, timeout, purpose
        # A connection of its own: a call on a store blocks all other threads that use the same connection.
        self._store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self._reports: dist.Store | None = None  # another connection, opened by the first report of progress
        self._reported = time.monotonic()
        self._every = min(_REPORT_EVERY, timeout.total_seconds() / 8)

    def put(self, name: str, value: Any) -> None:
        """Publish a value to all ranks, once per name."""
        self._store.set(self._key(name), json.dumps(value))

    def get(self, name: str) -> Any:
        """Wait for a value that any rank publishes, and return it.

        Raises NoProgress after the time-out without the value and without progress on any rank; Abandoned if
        a rank has abandoned the operation.
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
                raise NoProgress(f"no rank published {key!r} or reported progress for {self.timeout}")
            time.sleep(poll)
            poll = min(_LAST_POLL, 1.5 * poll)
        return json.loads(self._store.get(key))

    def pop(self, name: str) -> Any:
        """Like `get`, for a value that only this rank reads; deletes it from the store."""
        value = self.get(name)
        self._store.delete_key(self._key(name))
        return value

    def gather(self, name: str) -> list[Any]:
        """On rank 0: return every rank's value of `name`/RANK, by rank. Raises NoProgress naming the rank."""
        values = []
        for rank in range(self.topology.world_size):
            try:
                values.append(self.pop(f"{name}/{rank}"))
            except NoProgress:
                raise NoProgress(f"rank {rank} reported no progress for {self.timeout}") from None
        return values

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; this rank's is `value`. Rank 0 collects them for all."""
        self.put(f"{name}/{self.topology.rank}", value)
        if self.topology.rank == 0:
            self.put(name, self.gather(name))
        return self.get(name)

    def progress(self) -> None:
        """Report that this rank makes progress. To be called often, by any thread: most calls do nothing."""
        now = time.monotonic()
        if now - self._reported > self._every:
            self._reported = now
            self._reports = self._reports or self._store.clone()
            self._reports.add(self._key("progress"), 1)

    def abandon(self, reason: str) -> str | None:
        """Abandon the operation for all ranks. Returns the first rank's reason; None after a `commit`."""
        return self._decide(reason)

    def commit(self) -> str | None:
        """Commit the operation for all ranks. Returns None, or the reason if a rank abandoned it before."""
        return self._decide(None)

    def _decide(self, reason: str | None) -> str | None:
        """Return the first decision of any rank: None to commit, else the reason to abandon."""
        return json.loads(self._store.compare_set(self._key("decision"), "", json.dumps(reason)))

    def _raise_if_abandoned(self) -> None:
        if self._store.check([self._key("decision")]):
            reason = json.loads(self._store.get(self._key("decision")))
            if reason is not None:
                raise Abandoned(reason)

    def _key(self, name: str) -> str:
        return f"{self._purpose}/{name}"
