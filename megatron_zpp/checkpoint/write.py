"""Writes one checkpoint: each rank its file, then rank 0 what makes it a checkpoint."""

import json
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.directory import partial_path, remove_leftovers, retired_path, write_tracker
from megatron_zpp.checkpoint.exchange import Exchange
from megatron_zpp.checkpoint.manifest import write_manifest
from megatron_zpp.checkpoint.shard_file import write_shard_file
from megatron_zpp.storage.checksums import Checksums, checksums_of, verify_file
from megatron_zpp.storage.files import commit_directory, write_durably

STATE = "state.json"


class SaveFailed(OSError):
    """No new checkpoint: why, and on which rank. Those before are as they were."""


def shard_file_name(rank: int) -> str:
    """The file of a rank's shards."""
    return f"rank_{rank:05d}.safetensors"


def write_checkpoint(
    final: Path, tensors: Mapping[str, Tensor], state: dict[str, Any], exchange: Exchange, *, read_back: bool
) -> None:
    """Writes `final` from all ranks; each of them returns, or raises SaveFailed, once it knows how it went.

    Nothing stands under the final name before all of it is durable. `read_back` reads every file again from
    the disk before the checkpoint is committed.
    """
    rank, partial = exchange.topology.rank, partial_path(final)
    if rank == 0:
        problem = _attempt(rank, _open, partial)
        exchange.tell("open", problem)
    else:
        problem = exchange.hear("open")
    if problem:
        raise SaveFailed(problem)

    checksums: list[Checksums] = []
    problem = _attempt(rank, lambda: checksums.append(_write_shards(partial, rank, tensors, read_back)))
    report = {"problem": problem, "checksums": [one.to_json() for one in checksums]}
    exchange.tell(f"written/{rank}", report)
    if rank == 0:
        reports = [exchange.take(f"written/{other}") for other in range(exchange.topology.world_size)]
        problem = next((report["problem"] for report in reports if report["problem"]), None)
        problem = problem or _attempt(rank, _commit, partial, final, state, reports)
        if problem:
            shutil.rmtree(partial, ignore_errors=True)
        exchange.tell("outcome", problem)
    else:
        problem = exchange.hear("outcome")
    if problem:
        raise SaveFailed(problem)


def _attempt(rank: int, action: Any, *arguments: Any) -> str | None:
    """Why an action failed, in a line; None if it did not. What is no failure of files is raised."""
    try:
        action(*arguments)
    except (OSError, ValueError) as error:
        return f"rank {rank} on {platform.node()}: {error}"
    return None


def _open(partial: Path) -> None:
    remove_leftovers(partial.parent)
    partial.mkdir(parents=True)


def _write_shards(partial: Path, rank: int, tensors: Mapping[str, Tensor], read_back: bool) -> Checksums:
    path = partial / shard_file_name(rank)
    checksums = write_shard_file(path, tensors)
    if read_back:
        with path.open("rb") as file:  # or the page cache would vouch for the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        verify_file(path, checksums)
    return checksums


def _commit(partial: Path, final: Path, state: dict[str, Any], reports: list[dict[str, Any]]) -> None:
    write_durably(partial / STATE, (json.dumps(state, indent=1) + "\n").encode())
    files = {STATE: checksums_of(partial / STATE)}
    for rank, report in enumerate(reports):
        path = partial / shard_file_name(rank)
        files[path.name] = Checksums.from_json(report["checksums"][0], path)
        if not path.is_file() or path.stat().st_size != files[path.name].size:
            raise OSError(
                f"{path}: rank {rank} wrote it, but it is not there as seen from here; --save must name a "
                "directory that all nodes share"
            )
    write_manifest(partial, files)
    commit_directory(partial, final, retired_path(final))
    write_tracker(final.parent)
