"""Reads a checkpoint that was just committed back from the disk and compares it with what was written."""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from megatron_zpp.checkpoint.directory import remove_committed, write_tracker
from megatron_zpp.checkpoint.together import bounded, read_together
from megatron_zpp.checkpoint.write import SaveFailed, SaveOptions, attempt, shard_file_name
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.storage.checksums import Checksums, DamagedFile, OnProgress, thread_count, verify_file
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.sidecar import check_sidecar, sidecar_path


class NotReadBack(OSError):
    """A rank could not read its file: which rank, and why. The checkpoint is committed and may be whole."""


def read_back(path: Location, checksums: Checksums, exchange: Exchange, options: SaveOptions) -> None:
    """Read the checkpoint `path` from the disk, on each rank the file that the rank has just written.

    `checksums` are those that `write_checkpoint` returned. All ranks return, or all raise the same error:
    SaveFailed if a file is damaged both times that it is read, and the checkpoint is then removed;
    NotReadBack if a file could not be read, or if no rank made progress for the exchange's time-out.
    """
    rank = exchange.topology.rank
    file = path / shard_file_name(rank)

    def read(on_progress: OnProgress) -> None:
        try:
            _verify(file, checksums, on_progress)
        except DamagedFile:
            try:
                _verify(file, checksums, on_progress)  # the bytes may have changed on their way here
            except DamagedFile as found:
                raise DamagedFile(f"rank {rank} on {platform.node()} read back {found}") from None

    try:
        _, damage = read_together(read, exchange, options.files, "--save", path)
        if damage is None:
            return
        with bounded(exchange, "--save", path):
            if rank == 0:
                _, problem = attempt(exchange, options, partial(_remove, path, options))
                exchange.put("discarded", problem)
            kept = exchange.get("discarded")
    except ValueError as problem:
        raise NotReadBack(str(problem)) from None
    raise SaveFailed(f"{damage}; it could not be removed: {kept}" if kept else damage)


def _verify(path: Location, checksums: Checksums, on_progress: OnProgress) -> None:
    """Raises DamagedFile if the file or its sidecar differs from what was written."""
    for file in (path, sidecar_path(path)):
        _forget(file)
    check_sidecar(path, checksums)
    with ThreadPoolExecutor(thread_count(), thread_name_prefix="read back") as pool:
        verify_file(path, checksums, pool.map, on_progress)


def _forget(path: Location) -> None:
    """Drop a file from the page cache, from which it would be read otherwise. Raises DamagedFile."""
    if not isinstance(path, Path):
        return
    try:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except FileNotFoundError:
        raise DamagedFile(f"{path}: missing") from None


def _remove(path: Location, options: SaveOptions, on_progress: OnProgress) -> None:
    options.may_write()
    remove_committed(path, on_progress)
    write_tracker(path.parent)
