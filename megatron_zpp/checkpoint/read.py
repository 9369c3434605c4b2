"""Reads the elements of a checkpoint wherever its files have them, and checks all of their bytes."""

import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_zpp.checkpoint.directory import checkpoint_name, iteration_of
from megatron_zpp.checkpoint.manifest import read_manifest
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.shard_file import ShardFile
from megatron_zpp.checkpoint.slices import fill
from megatron_zpp.checkpoint.states import (
    buffer_name,
    placement_of,
    row_moments_name,
    saved_mesh,
    tensor_name,
)
from megatron_zpp.checkpoint.write import STATE, shard_file_name
from megatron_zpp.config.root import Config
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.state_codes import FORMS, STATE_BLOCK, is_scaled
from megatron_zpp.placement import Layout, Piece, Placement, overlap, within
from megatron_zpp.storage.checksums import (
    Checksums,
    DamagedFile,
    OnProgress,
    RecentChunks,
    no_report,
    thread_count,
    verify_file,
)
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.regular import read_limited
from megatron_zpp.storage.sidecar import read_sidecar
from megatron_zpp.zero.held_states import WEIGHTS, HeldStates
from megatron_zpp.zero.model_states import REFERENCE, name_beside, owners_of

_RECENT = 16  # chunks of all files, 64 MiB: parts of a parameter are read from up to 8 files in turns
_REQUESTS = 16  # chunks of objects at once: each waits for the store before its first byte
_DECODED_AT_ONCE = 1 << 22  # elements: decoding needs several times the memory of their numbers
STATE_LIMIT = 64 << 20  # bytes of state.json: 200 per parameter for 300,000 parameters, and the settings


class _Place(NamedTuple):
    """Where a checkpoint has a parameter, or rows of it: in the flat buffers of a unit, from `offset` on."""

    placement: Placement  # of the rows, as if they were the parameter
    first_row: int
    unit: int
    offset: int


class CheckpointReader:
    """A committed checkpoint. Use it in a `with` block.

    `on_progress` is called after every chunk, by any thread.

    Raises DamagedFile, with file and position, if anything differs from what was written; ValueError for an
    unknown version of the format, and if the directory's name and content have different iterations.
    """

    def __init__(self, path: Location, on_progress: OnProgress = no_report) -> None:
        self.path, self._on_progress = path, on_progress
        self._entries = read_manifest(path)
        if STATE not in self._entries:
            raise DamagedFile(f"{path}: its manifest does not name {STATE}")
        if self._entries[STATE].size > STATE_LIMIT:
            raise DamagedFile(f"{path / STATE}: is longer than {STATE_LIMIT:,} bytes")
        verify_file(path / STATE, self._checksums(STATE), on_progress=on_progress)
        try:
            self.state: dict[str, Any] = json.loads(read_limited(path / STATE, STATE_LIMIT))
            held = Progress.from_json(self.state["progress"]).iteration
            self.units: list[dict[str, Any]] = self.state["units"]
            self.mesh = saved_mesh(self.state)
            self._shapes: dict[str, tuple[int, ...]] = {}  # of whole parameters
            self._axes = [self.mesh.shards for _ in self.units]  # those of the layout of each
            self._places = self._find_places()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedFile(f"{path / STATE}: not the state of a run ({error!r:.400})") from None
        named = iteration_of(path)
        if named is not None and named != held:
            fix = f"rename it to {checkpoint_name(held)}, or move it away"
            raise ValueError(f"{path}: holds iteration {held}, not {named}; {fix}")
        if self.mesh.world_size > len(self._entries):
            raise DamagedFile(f"{path}: its manifest does not name the files of {self.mesh.world_size} ranks")
        self._files: dict[int, ShardFile] = {}
        self._recent = RecentChunks(_RECENT)
        threads = thread_count() if isinstance(path, Path) else _REQUESTS
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="checkpoint")

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.file.close()

    def has_file(self, name: str) -> bool:
        """Whether the manifest names a file."""
        return name in self._entries

    def check_file(self, name: str) -> None:
        """Check all bytes of a file that the manifest names. Raises DamagedFile."""
        verify_file(self.path / name, self._checksums(name), on_progress=self._on_progress)

    def config(self) -> Config:
        """The settings of the run that wrote the checkpoint."""
        try:
            return Config.from_json(self.state["config"])
        except ValueError as error:
            raise DamagedFile(f"{self.path / STATE}: {error}") from None

    def parameter(self, name: str) -> Tensor:
        """A parameter's weights, whole, in fp32 and on the CPU."""
        whole = Placement(name=name, shape=self._shapes[name])
        if whole.numel > sum(entry.size for entry in self._entries.values()):
            raise DamagedFile(f"{self.path / STATE}: {name} has more elements than the files have bytes")
        found, elements = torch.empty(whole.numel), range(whole.numel)
        self._fill(WEIGHTS, Piece(whole, elements, elements), Mesh(), found)
        return found.view(whole.shape)

    def parameters(self) -> dict[str, Tensor]:
        """All weights by the model's names, for a program of one process."""
        return {name: self.parameter(name) for name in self._shapes}

    def check_model(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise DamagedFile unless these are the parameters, of the model that `config` describes."""
        if self._shapes != shapes:
            problem = "its weights are not those of the model that it describes"
            raise DamagedFile(f"{self.path / STATE}: {problem}")

    def read_shard(self, kind: str, layout: Layout, elements: range, target: Tensor, mesh: Mesh) -> None:
        """Fill `target` (len(elements),) with elements of a unit's flat buffer, as the rank of `mesh` has it.

        All are fp32 and on the CPU. They are found by parameter and slice, wherever the saved units have
        them. Gaps are zero, and rows of a table that was saved with fewer.
        """
        for gap in layout.gaps_in(elements):
            target[gap].zero_()
        for piece in layout.pieces_in(elements):
            part = target[within(piece.at, elements)]
            if piece.placement.shape != self._shapes[piece.placement.name]:
                part.zero_()
            self._fill(kind, piece, mesh, part)

    def read_buffer(self, name: str, target: Tensor) -> None:
        """Fill `target`, on the CPU and contiguous, with a saved buffer of its shape and dtype."""
        self._file(0).read_into(buffer_name(name), 0, target.view(-1), self._pool.map)

    def read_row_moments(self, name: str, target: Tensor) -> None:
        """Fill `target` (rows,), on the CPU, with the moments of a parameter's rows, if they were saved."""
        file, saved = self._file(0), row_moments_name(name)
        if file.dtype(saved) is not None:
            file.read_into(saved, 0, target, self._pool.map)

    def _fill(self, kind: str, piece: Piece, mesh: Mesh, target: Tensor) -> None:
        """Fill `target` with a piece of what the rank of `mesh` has.

        With as many tensor ranks as saved, each reads its own copy of a parameter that is not split, so that
        it reads one file alone. Otherwise all read the copy of tensor rank 0, so that they agree whatever the
        copies are.
        """
        copy = mesh.tensor_rank if mesh.tensor_ranks == self.mesh.tensor_ranks else 0
        for placement, first_row, unit, offset in self._places[piece.placement.name]:
            read_into = partial(self._read_into, kind, unit, offset)
            fill(target, piece, mesh.rank, placement, read_into, first_row=first_row, copy=copy)

    def _read_into(self, kind: str, unit: int, offset: int, rank: int, first: int, target: Tensor) -> None:
        """Fill `target` with elements of a rank's flat buffer of a unit, from offset + `first` on."""
        owners = owners_of(kind, self.mesh.at(rank), self._axes[unit])
        numel = self._numel(unit)
        shard = numel // max(1, len(owners))  # a node may have none of what codes have lost
        wanted, held = range(offset + first, offset + first + len(target)), self._held(kind, unit)
        if first < 0 or offset < 0 or wanted.stop > numel:
            raise DamagedFile(f"{self.path / STATE}: unit {unit} has no shard {len(owners)}")
        there = overlap(wanted, held)
        if len(there) < len(wanted):
            target.zero_()
        while there:
            index = there.start // shard
            saved = overlap(range(index * shard, (index + 1) * shard), held)
            part, there = overlap(saved, there), range(min(saved.stop, there.stop), there.stop)
            self._read_saved(
                owners[index], kind, unit, part.start - saved.start, target[within(part, wanted)]
            )

    def _read_saved(self, owner: int, kind: str, unit: int, start: int, target: Tensor) -> None:
        """Fill `target` with elements of a rank's shard of a unit, decoded where they are not fp32."""
        file, name = self._file(owner), tensor_name(kind, unit)
        dtype = file.dtype(name)
        if dtype in (None, torch.float32):
            file.read_into(name, start, target, self._pool.map)
            return
        assert dtype is not None
        scaled = kind != WEIGHTS and is_scaled(FORMS.get(dtype, ""))
        block = STATE_BLOCK if scaled else 1
        stop = start + len(target)
        for first in range(start // block * block, stop, _DECODED_AT_ONCE):
            last = min(first + _DECODED_AT_ONCE, -(-stop // block) * block)
            values, beside = torch.empty(last - first, dtype=dtype), None
            file.read_into(name, first, values, self._pool.map)
            if scaled or kind == WEIGHTS:
                beside = torch.empty((last - first) // block, dtype=torch.uint8)
                file.read_into(tensor_name(name_beside(kind), unit), first // block, beside, self._pool.map)
            wanted = range(max(first, start), min(last, stop))
            decoded = HeldStates(kind, values, beside).decoded()
            target[within(wanted, range(start, stop))] = decoded[within(wanted, range(first, last))]

    def _held(self, kind: str, unit: int) -> range:
        """The elements of a unit that have a kind of states: untrained ones have none of the optimizer."""
        entry = self.units[unit]
        if entry.get("frozen") and kind not in (WEIGHTS, REFERENCE):
            return range(0)
        return range(*entry.get("states", {}).get(kind, (0, self._numel(unit))))

    def _numel(self, unit: int) -> int:
        """Elements of the flat buffer of a unit."""
        return self.units[unit]["shard_numel"] * math.prod(axis.size for axis in self._axes[unit])

    def _find_places(self) -> dict[str, list[_Place]]:
        """Where each parameter is."""
        places: dict[str, list[_Place]] = {}
        for index, unit in enumerate(self.units):
            for first, stop in unit.get("states", {}).values():
                if not 0 <= first <= stop:
                    raise ValueError(f"unit {index} has no elements {first!r} to {stop!r}")
            for name, entry in unit["parameters"].items():
                placement, first_row = placement_of(name, entry, self.mesh.tensor_ranks)
                self._axes[index] = placement.shards(self.mesh)
                place = _Place(placement, first_row, index, entry["offset"])
                places.setdefault(name, []).append(place)
                self._shapes[name] = tuple(entry["shape"])
        return places

    def check_rest(self, reader: int, readers: int) -> None:
        """Check what has not been read yet of every `readers`th file of shards, starting at file `reader`.

        Reader 0 also checks the other files.
        """
        for rank in range(reader, self.mesh.world_size, readers):
            self._file(rank).file.check_rest(self._pool.map)
        if reader == 0:
            shards = set(map(shard_file_name, range(self.mesh.world_size)))
            for name in self._entries.keys() - shards - {STATE}:
                self.check_file(name)

    def _file(self, rank: int) -> ShardFile:
        if rank not in self._files:
            name = shard_file_name(rank)
            if name not in self._entries:
                raise DamagedFile(f"{self.path}: its manifest does not name {name}")
            path, checksums = self.path / name, self._checksums(name)
            self._files[rank] = ShardFile(path, checksums, self._on_progress, self._recent)
        return self._files[rank]

    def _checksums(self, name: str) -> Checksums:
        """The checksums of a file that the manifest names, from its sidecar if it has one."""
        entry = self._entries[name]
        if isinstance(entry, Checksums):
            return entry
        checksums = read_sidecar(self.path / name, entry)
        self._on_progress()
        return checksums
