"""Exchanges JSON values between ranks through the store: outside of collectives, and from any thread.

A rank that waits sends one request, which the store answers once the value is there, and one request per
second to find out whether other ranks make progress. Rank 0 collects the values of N ranks with two requests.
"""

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_zpp.distributed.job_store import COUNTER
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.background import started

_REPORT_EVERY = 1.0  # seconds, at most, between reports of progress by a rank, and between checks for them
_POLL = 0.5  # seconds, at most, between requests for a value that a rank no longer waits for
_CONNECT = timedelta(seconds=10)  # for a new connection to a store, which may be gone
_NO_LIMIT = timedelta(days=7)  # of a request that waits; the thread that sent it is never waited for


class NoProgress(TimeoutError):
    """The value of `key` did not arrive, and no rank reported progress for the whole time-out."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class Abandoned(RuntimeError):
    """Another rank has abandoned the operation of this exchange; the message is its reason."""


class Exchange:
    """JSON values by name, in a store that all ranks share, for one operation such as a save or load.

    `purpose` separates the names of one operation from those of others; every rank must use the same
    purposes. A wait continues for as long as some rank reports progress, and fails after `timeout` without
    any, in an error that ends with `hint`.
    """

    def __init__(
        self, store: dist.Store, topology: Topology, timeout: timedelta, purpose: str, *, hint: str = ""
    ) -> None:
        self.topology, self.timeout, self._purpose, self._hint = topology, timeout, purpose, hint
        # A connection of its own: a call on a store blocks all other threads that use the same connection.
        self._store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self._store.set_timeout(timeout)  # the store's process may be stopped, or suspended with all others
        self._quick: dist.Store | None = None  # another connection, for requests that are answered at once
        self._looked = False
        self._reported = time.monotonic()
        self._every = min(_REPORT_EVERY, timeout.total_seconds() / 8)
        self._decision, self._progress = self._key("decision"), self._key(f"progress{COUNTER}")
        self._contributed: list[str] = []
        self._published: set[str] = set()

    def put(self, name: str, value: Any) -> None:
        """Publish a value to all ranks, once per name."""
        self._published.add(self._key(name))
        self._store.set(self._key(name), json.dumps(value))

    def get(self, name: str) -> Any:
        """Wait for a value that any rank publishes, and return it.

        Raises NoProgress after the time-out without the value and without progress on any rank; Abandoned if
        a rank has abandoned the operation.
        """
        return self._get_all([self._key(name)])[0]

    def contribute(self, name: str, value: Any) -> None:
        """Publish this rank's value of `name`, for `gather`; `clear` deletes it."""
        key = f"{name}/{self.topology.rank}"
        self._contributed.append(self._key(key))
        self.put(key, value)

    def gather(self, name: str) -> list[Any]:
        """On rank 0: the values of all ranks, by rank. Raises NoProgress naming the first without one."""
        keys = [self._key(f"{name}/{rank}") for rank in range(self.topology.world_size)]
        try:
            return self._get_all(keys)
        except NoProgress as silence:
            rank = keys.index(silence.key)
            raise NoProgress(f"rank {rank} reported no progress for {self.timeout}{self._hint}") from None

    def combine(self, name: str, value: Any, combination: Callable[[list[Any]], Any]) -> Any:
        """Return on every rank what `combination` returns on rank 0 for the values of all ranks, by rank.

        `combination` must not raise. It makes one value of N, so that no rank reads N values but rank 0.
        """
        self.contribute(name, value)
        if self.topology.rank == 0:
            self.put(name, combination(self.gather(name)))
        combined = self.get(name)
        self.clear()
        return combined

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; this rank's is `value`. Rank 0 collects them for all."""
        return self.combine(name, value, list)

    def first(self, name: str, value: Any) -> Any:
        """Return on every rank the value of the lowest rank that has one which is not None; else None."""
        return self.combine(name, value, lambda them: next((one for one in them if one is not None), None))

    def clear(self) -> None:
        """Delete from the store what this rank contributed. To be called when rank 0 has gathered it.

        Never after a failure: rank 0 may gather later, and its request would wait for the deleted value.
        """
        while self._contributed:
            key = self._contributed.pop()
            self._store.delete_key(key)
            self._published.discard(key)

    def keys(self) -> set[str]:
        """The keys that this rank has to `forget`: what it published; on rank 0 also those of all ranks."""
        shared = {self._decision, self._progress} if self.topology.rank == 0 else set()
        return self._published | shared

    def forget(self, keys: Iterable[str]) -> None:
        """Delete this rank's `keys()` of earlier operations, which every rank must have ended.

        All ranks have ended them once each has contributed to this operation, if it began after them. Other
        ranks than 0 have such keys only of operations that failed.
        """
        for key in keys:
            self._store.delete_key(key)

    def progress(self) -> None:
        """Report that this rank makes progress. To be called often, by any thread: most calls do nothing."""
        now = time.monotonic()
        if now - self._reported > self._every:
            self._reported = now
            self._quick_store().add(self._progress, 1)

    def decide(self, reason: str | None) -> str | None:
        """Abandon the operation for a `reason`, or commit it, for all ranks, if none has decided yet.

        Returns the first decision of any rank: None to commit, else the reason.
        """
        return json.loads(self._store.compare_set(self._decision, "", json.dumps(reason)))

    def _get_all(self, keys: list[str]) -> list[Any]:
        """Wait for the values of all keys, and return them. NoProgress has the first key without one."""
        patience = _Patience(self.timeout, keys, longer=2 * self._every, hint=self._hint)
        while True:
            # A request with a time-out would write warnings to stderr whenever the time is over.
            answer = started(lambda: self._store.wait(keys, _NO_LIMIT), "exchange")
            try:
                while not wait([answer], self._every).done:
                    self._look(patience)
                answer.result()
            except dist.DistError:  # the store is gone, and a new connection would be tried for long
                raise
            except BaseException:
                self._release(keys)
                raise
            values = self._store.multi_get(keys)
            if all(values):
                return [json.loads(value) for value in values]
            time.sleep(min(_POLL, self._every))  # another rank has ended the wait
            self._look(patience)

    def _look(self, patience: "_Patience") -> None:
        """Raises Abandoned if a rank has abandoned the operation, NoProgress if `patience` is at its end."""
        store = self._quick_store()
        if not self._looked:
            store.compare_set(self._decision, "", "")
            store.add(self._progress, 0)
            self._looked = True
        decision, progress = store.multi_get([self._decision, self._progress])
        if decision and (reason := json.loads(decision)) is not None:
            raise Abandoned(reason)
        patience.see(progress, store)

    def _release(self, keys: list[str]) -> None:
        """End this rank's wait for keys, and with it those of all ranks, which then ask again and again."""
        with suppress(dist.DistError):  # the store is gone
            for key in keys:
                self._quick_store().compare_set(key, "", "")  # a key without a value

    def _quick_store(self) -> dist.Store:
        """Made when it is needed, since each connection may wait for a name server; raises DistError."""
        if self._quick is None:
            self._store.set_timeout(_CONNECT)
            try:
                self._quick = self._store.clone()
            finally:
                self._store.set_timeout(self.timeout)
            self._quick.set_timeout(self.timeout)
        return self._quick

    def _key(self, name: str) -> str:
        return f"{self._purpose}/{name}"


class _Patience:
    """How long a rank waits: until a time-out without progress, and without the next of the values.

    And for `longer` seconds after that, because a rank that is stuck notices first and can say where.
    """

    def __init__(self, timeout: timedelta, keys: list[str], longer: float = 0.0, hint: str = "") -> None:
        self._timeout, self._keys, self._hint = timeout, keys, hint
        self._seconds = timeout.total_seconds() + longer
        self._absent = 0  # the first key that has not been seen
        self._progress: bytes | None = None
        self._deadline = 0.0
        self._extend()

    def see(self, progress: bytes, store: dist.Store) -> None:
        """Take note of the progress that ranks have reported. Raises NoProgress when the time is over."""
        if progress != self._progress:
            self._progress = progress
            self._extend()
        count = 1  # of keys in a request: doubled while all of them exist
        while count and self._absent < len(self._keys) - 1:
            if store.check(self._keys[self._absent : self._absent + count]):
                self._absent = min(self._absent + count, len(self._keys) - 1)
                self._extend()
                count *= 2
            else:
                count //= 2
        if time.monotonic() > self._deadline:
            key = self._keys[self._absent]
            problem = f"no rank published {key!r} or reported progress for {self._timeout}"
            raise NoProgress(f"{problem}{self._hint}", key)

    def _extend(self) -> None:
        self._deadline = time.monotonic() + self._seconds
