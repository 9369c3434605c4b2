"""Tells a directory that was moved, or is mounted at another path, from a copy of it."""

import os
from pathlib import Path
from typing import NamedTuple

from megatron_zpp.memory_snapshots.run_memory import kind_of_file_system
from megatron_zpp.storage.location import Location


class DirectoryIdentity(NamedTuple):
    """Which directory it is, for hosts that may have mounted it at different paths.

    `path` is absolute and without links, or a URL. `inode` is None in an object store, which has none, and on
    FUSE, where it may be another one at each mount. `file_system` is what statvfs(3) calls f_fsid; 0 if there
    is none, as on NFS. A device number would not do, because each host gives its mounts its own.
    """

    path: str
    inode: int | None
    file_system: int

    @classmethod
    def of(cls, directory: Location) -> "DirectoryIdentity":
        """The identity of a directory that exists. Raises OSError."""
        if not isinstance(directory, Path):
            return cls(str(directory), None, 0)
        path = os.path.realpath(directory)
        if (kind_of_file_system(path) or "").startswith("fuse"):
            return cls(path, None, 0)
        return cls(path, os.stat(path).st_ino, os.statvfs(path).f_fsid)

    def is_same(self, other: "DirectoryIdentity") -> bool:
        """Whether both are the same directory, at the same or another path; False for a copy."""
        if self.inode is None or other.inode is None:
            return self.path == other.path
        ids = {self.file_system, other.file_system}
        return self.inode == other.inode and (self.path == other.path or len(ids) == 1 or 0 in ids)
