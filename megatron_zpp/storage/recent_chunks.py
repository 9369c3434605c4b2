"""Keeps the newest chunks of which a reader needed a part, because its next read may need the rest."""

import threading
from collections import OrderedDict

from megatron_zpp.storage.location import Location


class RecentChunks:
    """At most `most` chunks, by file and number, in memory that does not change. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._chunks: OrderedDict[tuple[Location, int], memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Location, index: int) -> memoryview | None:
        """Return chunk `index` of the file `path`, if it is here."""
        with self._lock:
            return self._chunks.get((path, index))

    def put(self, path: Location, index: int, chunk: memoryview) -> None:
        """Keep a verified chunk, and forget the oldest ones."""
        with self._lock:
            self._chunks[path, index] = chunk
            while len(self._chunks) > self._most:
                self._chunks.popitem(last=False)
