"""Reads a checkpoint that was just committed back from the disk and compares it with what was written."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.together import read_together
from megatron_zpp.checkpoint.write import SaveFailed, shard_file_name
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.storage.checksums import Checksums, OnProgress, thread_count, verify_file
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.regular import open_ranges
from megatron_zpp.storage.sidecar import check_sidecar, sidecar_path


class NotReadBack(SaveFailed):
    """The checkpoint is committed, and damaged, or a rank could not read its file: which one, and why."""


def read_back(path: Location, checksums: Checksums, exchange: Exchange, files: FileWorker) -> None:
    """Read the checkpoint `path` from the disk, on each rank the file that the rank has just written.

    `checksums` are those that `write_checkpoint` returned. All ranks return, or all raise the same
    NotReadBack, also if no rank made progress for the exchange's time-out.
    """
    file = path / shard_file_name(exchange.topology.rank)
    try:
        _, damage = read_together(
            lambda on_progress: _verify(file, checksums, on_progress), exchange, files, "--save", path
        )
    except ValueError as problem:
        raise NotReadBack(str(problem)) from None
    if damage:
        raise NotReadBack(damage)


def _verify(path: Location, checksums: Checksums, on_progress: OnProgress) -> None:
    """Raise DamagedFile, or FileNotFoundError, if the file or its sidecar is not what was written."""
    for file in (path, sidecar_path(path)):
        with closing(open_ranges(file)) as opened:
            opened.forget(0, 0)  # to the end: it would be read from the page cache otherwise
    check_sidecar(path, checksums)
    with ThreadPoolExecutor(thread_count(), thread_name_prefix="read back") as pool:
        verify_file(path, checksums, pool.map, on_progress)
