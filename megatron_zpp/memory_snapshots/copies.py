"""Copies of ranks' states in a directory in memory: how they are named, written, found and made a checkpoint.

A memory snapshot is the states of all ranks at one iteration. Each rank's copy of it is two files, on its own
node and on its buddy node:

    holder_K/                               what ranks of node K hold; nodes are numbered anew at each start
        iter_0000040-1a2b3c4d/              iteration, and the start of the run that took the snapshot
            rank_00003.safetensors          the rank's shards, as in a checkpoint
            rank_00003.json                 written last: a SHA-256, and JSON: `checksums`, `layout`, `state`

`state` is the content of a checkpoint's state.json, and `layout` a digest of what in it says which rank has
which elements.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_zpp.checkpoint.manifest import format_version, write_manifest
from megatron_zpp.checkpoint.shard_file import write_shard_file
from megatron_zpp.checkpoint.write import STATE, shard_file_name
from megatron_zpp.storage.checksums import JSON_LIMIT, Checksums, DamagedFile, checksums_of
from megatron_zpp.storage.files import open_new
from megatron_zpp.storage.regular import read_limited

_NAME = re.compile(r"iter_(\d{7,15})-([0-9a-f]{8})")
_DESCRIPTION = re.compile(r"rank_(\d{5,9})\.json")
_LAYOUT = ("ranks", "nodes", "tensor", "units")


class SnapshotName(NamedTuple):
    """A memory snapshot; `attempt` is the start of the run that took it."""

    iteration: int
    attempt: str

    def __str__(self) -> str:
        return f"iter_{self.iteration:07d}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> "SnapshotName | None":
        """The inverse of `str`; None for other texts."""
        match = _NAME.fullmatch(text)
        return cls(int(match[1]), match[2]) if match else None

    @classmethod
    def checked(cls, iteration: Any, attempt: Any) -> "SnapshotName":
        """The name with fields that another rank sent; a directory gets it. Raises ValueError for others."""
        name = cls(iteration, attempt)
        if type(iteration) is not int or cls.parse(str(name)) != name:
            raise ValueError(f"a rank sent what is no name of a memory snapshot: {[iteration, attempt]!r}")
        return name


class Found(NamedTuple):
    """A copy of `nbytes` that is whole as far as its name says; `ranks` and `layout` are its snapshot's."""

    rank: int
    nbytes: int
    ranks: int
    layout: str


def file_names(snapshot: SnapshotName, rank: int) -> tuple[str, str]:
    """The names of a copy's files below a holder: of the shards, then of their description."""
    return f"{snapshot}/{shard_file_name(rank)}", f"{snapshot}/rank_{rank:05d}.json"


def layout_of(state: Mapping[str, Any]) -> str:
    """A digest of what says which rank has which elements."""
    text = json.dumps([state[key] for key in _LAYOUT], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class MemoryCopies:
    """The copies in the directory of a run on one node, of which this rank's node is `holder`."""

    def __init__(self, directory: Path, holder: int) -> None:
        self._directory = directory
        self.path = directory / f"holder_{holder}"

    def write(
        self, snapshot: SnapshotName, rank: int, tensors: Mapping[str, Tensor], state: dict[str, Any]
    ) -> None:
        """Write a rank's copy. Raises OSError."""
        shards, description = (self.path / name for name in file_names(snapshot, rank))
        shards.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        checksums = write_shard_file(shards, tensors)
        fields = {"checksums": checksums.to_json(), "layout": layout_of(state), "state": state}
        text = json.dumps(fields).encode()
        partial = description.with_suffix(".partial")
        with os.fdopen(open_new(partial), "wb") as file:
            file.write(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        os.replace(partial, description)

    def find(self, name: str) -> Path | None:
        """The file with a name of `file_names`, whichever node of this host holds it."""
        return next(iter(sorted(self._directory.glob(f"holder_*/{name}"))), None)

    def found(self) -> tuple[dict[SnapshotName, list[Found]], list[str]]:
        """The copies that are here, by snapshot and rank; and why others cannot be used."""
        copies: dict[SnapshotName, dict[int, Found]] = {}
        problems = []
        for path in sorted(self._directory.glob("holder_*/iter_*/rank_*.json")):
            snapshot, match = SnapshotName.parse(path.parent.name), _DESCRIPTION.fullmatch(path.name)
            if snapshot is None or match is None:
                continue
            try:
                fields = _read_description(path)
                nbytes = path.with_suffix(".safetensors").stat().st_size
            except (DamagedFile, OSError) as problem:
                problems.append(str(problem))
                continue
            copy = Found(int(match[1]), nbytes, fields["state"]["ranks"], fields["layout"])
            copies.setdefault(snapshot, {})[copy.rank] = copy
        return {snapshot: list(ranks.values()) for snapshot, ranks in copies.items()}, problems

    def assemble(self, snapshot: SnapshotName, ranks: Iterable[int], target: Path) -> None:
        """Make `target` a checkpoint with the shards of `ranks`, whose copies must be here.

        It costs no memory, because it has second names of the same files. Raises DamagedFile and OSError.
        """
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700)
        files, state = {}, None
        for rank in ranks:
            shards, description = (self._present(name) for name in file_names(snapshot, rank))
            fields = _read_description(description)
            state = state or fields["state"]
            os.link(shards, target / shard_file_name(rank))
            files[shard_file_name(rank)] = Checksums.from_json(fields["checksums"], description)
        with os.fdopen(open_new(target / STATE), "w") as file:
            json.dump(state, file)
        files[STATE] = checksums_of(target / STATE)
        write_manifest(target, files, None if state is None else format_version(state))

    def remove(self, snapshot: SnapshotName) -> None:
        """Remove what this host has of a snapshot."""
        self._remove(lambda name: name == snapshot)

    def remove_before(self, kept: SnapshotName) -> None:
        """Remove earlier snapshots of the same start than `kept`, and those of other starts."""
        self._remove(lambda name: name.attempt != kept.attempt or name < kept)

    def remove_start(self, attempt: str) -> None:
        """Remove the snapshots of one start."""
        self._remove(lambda name: name.attempt == attempt)

    def remove_earlier_starts(self, attempt: str, *, kept: SnapshotName | None) -> None:
        """Remove the snapshots of other starts than `attempt`, except `kept`.

        Other ranks may be writing those of `attempt` already.
        """
        self._remove(lambda name: name.attempt != attempt and name != kept)

    def _remove(self, obsolete: Callable[[SnapshotName], bool]) -> None:
        for path in self._directory.glob("holder_*/iter_*"):
            name = SnapshotName.parse(path.name)
            if name is not None and obsolete(name):
                shutil.rmtree(path, ignore_errors=True)

    def _present(self, name: str) -> Path:
        path = self.find(name)
        if path is None:
            raise DamagedFile(f"{self._directory}: has no {name}")
        return path


def _read_description(path: Path) -> dict[str, Any]:
    """The content of a description. Raises DamagedFile if it is not what was written, and OSError."""
    digest, _, text = read_limited(path, JSON_LIMIT).partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise DamagedFile(f"{path}: damaged: its SHA-256 is not the one that was written")
    return json.loads(text)
