"""Writes one checkpoint: each rank writes its file, then rank 0 the rest, manifest and marker."""

import errno
import json
import platform
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.directory import (
    PARTIAL,
    RETIRED,
    aside,
    places_of,
    remove_leftovers,
    write_tracker,
)
from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.manifest import Entry, format_version, write_manifest
from megatron_zpp.checkpoint.shard_file import write_shard_file
from megatron_zpp.config.command_line import one_line
from megatron_zpp.distributed.exchange import Abandoned, Exchange, NoProgress
from megatron_zpp.storage.checksums import OnProgress, checksums_of_bytes
from megatron_zpp.storage.files import commit_directory, naming, sizes_in, write_durably
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.sidecar import SidecarDigest, write_sidecar

STATE = "state.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)  # no space on the file system; over the user's quota


class SaveFailed(OSError):
    """No new checkpoint was written: why, and on which rank. Earlier checkpoints are unchanged."""


def shard_file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def write_checkpoint(
    final: Location,
    tensors: Mapping[str, Tensor],
    state: dict[str, Any],
    exchange: Exchange,
    files: FileWorker,
    *,
    may_write: Callable[[], None] = lambda: None,
    beside: Mapping[str, bytes] | None = None,
) -> tuple[Location, SidecarDigest]:
    """Write `final` from all ranks; each rank returns, or raises SaveFailed, once it knows the outcome.

    Returns where the checkpoint is, and the digest of this rank's file, for `read_back`. `files` runs
    operations that may get stuck in the file system. Rank 0 calls `may_write` before it creates or removes
    anything, and again before it commits; if it raises OSError, the save fails with that error. `beside`: the
    contents of more files by name, those of the tokenizer; rank 0 writes them.

    The checkpoint is committed only after all of it is durable. A save may take as long as some rank
    makes progress with its file. If no rank does for the exchange's time-out, the save fails on all ranks,
    and the slow rank abandons its work.
    """
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # another thread reads them on another stream
    by_rank_0 = exchange.topology.rank == 0
    save = _Save(final, tensors, exchange, files, may_write)
    try:
        if by_rank_0:
            texts = {**(beside or {}), STATE: (json.dumps(state, indent=1) + "\n").encode()}
            problem = save.lead(texts, format_version(state))
        else:
            problem = save.follow()
    except Abandoned as abandoned:
        problem = str(abandoned)
    except NoProgress as silence:
        problem = exchange.decide(str(silence))
        if problem is None:  # rank 0 has decided to commit, and only the result is missing
            problem = _outcome(exchange)
    if problem and by_rank_0:
        if save.directory is not None:  # else nothing was written
            save.attempt(lambda on_progress: _remove(final, may_write))
        exchange.put("outcome", problem)
    if problem:  # rank 0 may still wait for values, which therefore stay
        raise SaveFailed(problem)
    exchange.clear()
    assert save.digest is not None, "committed without this rank's file"
    if save.directory is None or isinstance(save.directory, Path):
        return final, save.digest
    return save.directory, save.digest  # of an object store, what is written stays where it is


@dataclass
class _Save:
    """One rank's part of a save; the digest of its file, once it is written."""

    final: Location
    tensors: Mapping[str, Tensor]
    exchange: Exchange
    files: FileWorker
    may_write: Callable[[], None]
    full: str = ""  # why nothing more can be written to the file system, if that is so
    digest: SidecarDigest | None = None
    directory: Location | None = None  # that all ranks write to

    def lead(self, texts: Mapping[str, bytes], version: int) -> str | None:
        """Do rank 0's part; returns why there is no new checkpoint, or None."""
        exchange = self.exchange
        partial, problem = self.attempt(lambda on_progress: _open(self.final, self.may_write))
        exchange.put("open", {"problem": problem, "name": None if problem else partial.name})
        if problem:
            return problem
        self._write_and_report(partial)
        reports = exchange.gather("written")
        problem = next((report["problem"] for report in reports if report["problem"]), None)
        if full := next((report["full"] for report in reports if report["full"]), None):
            problem = _no_space(full, partial, self.final, sum(report["size"] for report in reports))
        if not problem:
            _, problem = self.attempt(lambda on_progress: self.may_write())
        if problem := exchange.decide(problem or None):
            return problem
        _, problem = self.attempt(
            lambda on_progress: _commit(partial, self.final, texts, version, reports, on_progress)
        )
        if not problem:
            exchange.put("outcome", None)
        return problem

    def follow(self) -> str | None:
        """Do another rank's part; returns why there is no new checkpoint, or None."""
        opened = self.exchange.get("open")
        if opened["problem"]:
            return opened["problem"]
        places = {place.name: place for place in places_of(self.final)}
        self._write_and_report(places[opened["name"]])
        return self.exchange.get("outcome")

    def attempt(self, action: Callable[[OnProgress], Any]) -> tuple[Any, str | None]:
        """What an action returns, and its OSError or ValueError in one line; one is None."""
        try:
            return self.files.run(action, self.exchange), None
        except (OSError, ValueError) as error:
            return None, f"rank {self.exchange.topology.rank} on {platform.node()}: {one_line(error)}"

    def _write_and_report(self, partial: Location) -> None:
        """Write this rank's file and report the result to rank 0."""
        path = partial / shard_file_name(self.exchange.topology.rank)
        self.directory = partial
        self.digest, problem = self.attempt(lambda on_progress: self._write(path, on_progress))
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        digest = None if self.digest is None else self.digest.to_json()
        report = {"problem": problem, "size": size, "full": self.full, "digest": digest}
        self.exchange.contribute("written", report)

    def _write(self, path: Location, on_progress: OnProgress) -> SidecarDigest:
        """Write file and sidecar, and make them durable."""
        try:
            with naming(path):
                digest = write_sidecar(path, write_shard_file(path, self.tensors, on_progress))
        except OSError as error:
            if error.errno in _FULL:
                self.full = error.strerror or ""
            raise
        on_progress()
        return digest


def _outcome(exchange: Exchange) -> str | None:
    """Rank 0's result after a `commit`. If rank 0 is dead, its missing heartbeat ends this process."""
    while True:
        with suppress(NoProgress):
            return exchange.get("outcome")


def _no_space(reason: str, partial: Location, final: Location, needed: int) -> str:
    """Why a checkpoint of `needed` bytes has no place: the space free without what is written of it."""
    free = 0
    with suppress(OSError):
        if isinstance(partial, Path):
            free = shutil.disk_usage(partial).free + sum(file.stat().st_size for file in partial.iterdir())
    return f"{final}: {reason}: it needs {needed:,} bytes, and {free:,} are free"


def _open(final: Location, may_write: Callable[[], None]) -> Location:
    """Return the directory that all ranks write to, after removing what earlier saves have left."""
    may_write()
    if not isinstance(final, Path):
        from megatron_zpp.checkpoint.object_saves import begin_save

        return begin_save(final)
    remove_leftovers(final.parent)
    partial = aside(final, PARTIAL)
    partial.mkdir(parents=True)
    return partial


def _remove(final: Location, may_write: Callable[[], None]) -> None:
    """Remove a failed save. Raises OSError if the directory may belong to another run."""
    may_write()
    if not isinstance(final, Path):
        from megatron_zpp.checkpoint.object_saves import discard_save

        discard_save(final)
    else:
        shutil.rmtree(aside(final, PARTIAL), ignore_errors=True)


def _commit(
    partial: Location,
    final: Location,
    texts: Mapping[str, bytes],
    version: int,
    reports: list[dict[str, Any]],
    on_progress: OnProgress,
) -> None:
    files: dict[str, Entry] = {}
    for name, text in texts.items():
        write_durably(partial / name, text)
        files[name] = checksums_of_bytes(text)
        on_progress()
    sizes = sizes_in(partial, map(shard_file_name, range(len(reports))))
    for rank, report in enumerate(reports):
        path = partial / shard_file_name(rank)
        files[path.name] = SidecarDigest.from_json(report["digest"], path)
        if sizes.get(path.name) != files[path.name].size:
            problem = f"rank {rank} wrote it, but it is not there as seen from here"
            raise OSError(f"{path}: {problem}; --save must name a directory that all nodes share")
        on_progress()
    write_manifest(partial, files, version)
    on_progress()  # raises if the save was abandoned, before a directory gets its name
    if isinstance(partial, Path) and isinstance(final, Path):
        commit_directory(partial, final, aside(final, RETIRED))
    elif not isinstance(partial, Path) and not isinstance(final, Path):
        from megatron_zpp.checkpoint.object_saves import end_save

        end_save(partial, final)
    write_tracker(final.parent)
