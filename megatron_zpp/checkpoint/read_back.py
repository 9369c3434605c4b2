"""Reads a checkpoint that was just committed back from the disk and compares it with what was written."""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_zpp.checkpoint.directory import remove_committed, write_tracker
from megatron_zpp.checkpoint.write import SaveFailed, SaveOptions, attempt, outcome, shard_file_name
from megatron_zpp.distributed.exchange import Abandoned, Exchange, NoProgress
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
    try:
        damage = _lead if exchange.topology.rank == 0 else _follow
        problem = damage(path, checksums, exchange, options)
    except Abandoned as abandoned:
        raise NotReadBack(str(abandoned)) from None
    except NoProgress as silence:
        reason = exchange.abandon(str(silence))
        if reason is not None:
            raise NotReadBack(reason) from None
        problem = outcome(exchange)
    exchange.clear()
    if problem:
        raise SaveFailed(problem)


def _lead(path: Location, checksums: Checksums, exchange: Exchange, options: SaveOptions) -> str | None:
    """Rank 0's part; returns the damage, or None."""
    _read_and_report(path, checksums, exchange, options)
    reports = exchange.gather("read")
    damage, problem = (
        next((report[kind] for report in reports if report[kind]), None) for kind in ("damage", "problem")
    )
    if damage is None and problem is not None:
        raise Abandoned(exchange.abandon(problem))
    if reason := exchange.commit():
        raise Abandoned(reason)
    if damage is not None:
        kept = attempt(exchange, options, lambda on_progress: _remove(path, options, on_progress))
        damage += f"; it could not be removed: {kept}" if kept else ""
    exchange.put("outcome", damage)
    return damage


def _follow(path: Location, checksums: Checksums, exchange: Exchange, options: SaveOptions) -> str | None:
    """Another rank's part; returns the damage, or None."""
    _read_and_report(path, checksums, exchange, options)
    return exchange.get("outcome")


def _read_and_report(path: Location, checksums: Checksums, exchange: Exchange, options: SaveOptions) -> None:
    """Read this rank's file and sidecar, and report the result to rank 0."""
    file = path / shard_file_name(exchange.topology.rank)
    damage: list[str] = []

    def read(on_progress: OnProgress) -> None:
        try:
            _verify(file, checksums, on_progress)
        except DamagedFile:
            try:
                _verify(file, checksums, on_progress)  # the bytes may have changed on their way here
            except DamagedFile as found:
                damage.append(f"rank {exchange.topology.rank} on {platform.node()} read back {found}")

    problem = attempt(exchange, options, read)
    exchange.contribute("read", {"problem": problem, "damage": next(iter(damage), None)})


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
