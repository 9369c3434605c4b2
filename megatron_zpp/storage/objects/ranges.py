"""Reads ranges of an object while its content stays what it was when it was opened."""

from megatron_zpp.storage.location import Conflict, NoObject
from megatron_zpp.storage.objects.path import ObjectPath


class ObjectRanges:
    """An object. Reading raises Conflict, an OSError, once another content has replaced what was opened."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, status = path, path.status()
        self.size, self.modified, self.tag = status.size, status.modified, status.tag

    def read(self, start: int, size: int) -> bytes:
        """Return the bytes [start, start + size), which must be in the object."""
        if not size:
            return b""
        try:
            return self._path.read(start, size, self.tag)
        except (Conflict, NoObject) as error:
            reason = "was replaced or removed while it was read; restore it and start again"
            raise Conflict(error.errno, reason, str(self._path)) from None

    def read_into(self, start: int, target: memoryview) -> int:
        """See Ranges."""
        content = self.read(start, min(len(target), self.size - start))
        target[: len(content)] = content
        return len(content)

    def forget(self, start: int, size: int) -> None:
        """Nothing of an object is kept."""

    def close(self) -> None:
        """Nothing is open between requests."""
