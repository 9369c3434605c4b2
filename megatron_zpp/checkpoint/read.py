"""Reads the elements of a checkpoint wherever its files have them, and checks all of their bytes."""

import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_zpp.checkpoint.directory import checkpoint_name, iteration_of
from megatron_zpp.checkpoint.manifest import read_manifest
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.shard_file import ShardFile
from megatron_zpp.checkpoint.slices import UNSHARED, Part, Sharing, blocks, fill, same_part
from megatron_zpp.checkpoint.states import buffer_name, tensor_name
from megatron_zpp.checkpoint.unit_entries import (
    local_shape,
    rows_of,
    split_of,
)
from megatron_zpp.checkpoint.write import STATE, shard_file_name
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.grid import Grid
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.checksums import (
    Checksums,
    DamagedFile,
    OnProgress,
    no_report,
    thread_count,
    verify_file,
)
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.recent_chunks import RecentChunks
from megatron_zpp.storage.regular import read_limited
from megatron_zpp.storage.sidecar import read_sidecar
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.model_states import REFERENCE, WEIGHTS

_RECENT = (
    16  # chunks of all files together, 64 MiB: parts of a parameter are read from up to 8 files in turns
)
_REQUESTS = 16  # chunks of objects at once: each waits for the store before its first byte
STATE_LIMIT = 64 << 20  # bytes of state.json: 200 per parameter for 300,000 parameters, and the settings


class _Run(NamedTuple):
    """Elements of a saved tensor rank's flat buffer of a unit, and the first element where they belong.

    If no tensor rank has saved such a part, elements of the part of the parameter `name` instead.
    """

    tensor_rank: int | None
    unit: int
    name: str  # of the first parameter
    elements: range
    destination: int

    def continues_in(self, other: "_Run") -> bool:
        """Whether one read finds both."""
        if self.tensor_rank is None or (self.tensor_rank, self.unit) != (other.tensor_rank, other.unit):
            return False
        return other.elements.start - self.elements.start == other.destination - self.destination


class _Place(NamedTuple):
    """Where a checkpoint has elements of a tensor rank's part of a parameter: all of them, or a block's.

    `offset` is the place of the first one in the flat buffer of the unit. `shape` is that of the parameter.
    """

    elements: range
    unit: int
    offset: int
    shape: tuple[int, ...]


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
            self.ranks: int = self.state["ranks"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedFile(f"{path / STATE}: not the state of a run ({error!r:.400})") from None
        named = iteration_of(path)
        if named is not None and named != held:
            fix = f"rename it to {checkpoint_name(held)}, or move it away"
            raise ValueError(f"{path}: holds iteration {held}, not {named}; {fix}")
        if self.ranks > len(self._entries):
            raise DamagedFile(f"{path}: its manifest does not name the files of {self.ranks} ranks")
        self.tensor: int = self.state.get("tensor", 1)
        local = self.ranks // self.state.get("nodes", 1)
        self._data_ranks = Grid(Topology(0, self.ranks, 0, local), self.tensor).data
        entries = [(name, entry) for unit in self.units for name, entry in unit["parameters"].items()]
        splits = {name: split for name, entry in entries if (split := split_of(entry)) is not None}
        self._sharing = Sharing(splits, self.tensor)
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

    def elements(self, kind: str, name: str, elements: range) -> Tensor:
        """Elements of a whole parameter's fp32 weights or moment, (len(elements),) on the CPU."""
        found = torch.empty(len(elements))
        self._fill(kind, name, UNSHARED.part(name), elements, found)
        return found

    def read_shard(
        self,
        kind: str,
        names: Sequence[str],
        layout: FlatLayout,
        elements: range,
        target: Tensor,
        sharing: Sharing = UNSHARED,
        *,
        first: int = 0,
    ) -> None:
        """Fill `target` (len(elements),) with elements of the flat buffer of parameters `names` in `layout`.

        All are fp32 and on the CPU. They are found by parameter and slice, wherever the saved units have
        them. The buffer has the parts of the reader's tensor rank in `sharing`. Gaps are zero. `first`: the
        number that the buffer's first element has in its only parameter, of which it is a block.
        """
        for gap in layout.gaps_in(elements):
            target[gap.start : gap.stop].zero_()
        for run in self._runs(names, layout, elements, sharing, first):
            part = target[run.destination : run.destination + len(run.elements)]
            if run.tensor_rank is None:
                self._fill(kind, run.name, sharing.part(run.name), run.elements, part)
            else:
                self._read_into(kind, run.unit, run.tensor_rank, run.elements.start, part)

    def read_buffer(self, name: str, target: Tensor) -> None:
        """Fill `target`, on the CPU and contiguous, with a saved buffer of its shape and dtype."""
        self._file(0).read_into(buffer_name(name), 0, target.view(-1), self._pool.map)

    def _runs(
        self, names: Sequence[str], layout: FlatLayout, elements: range, sharing: Sharing, first: int
    ) -> Iterator[_Run]:
        """Where the files have these elements; parameters that are adjacent in both form one run."""
        last = None
        for piece in layout.parameter_slices(elements):
            name, start = names[piece.parameter], first + piece.start
            rank = same_part(self._sharing.part(name), sharing.part(name))
            for run in self._runs_of(name, range(start, start + piece.length), rank, piece.destination):
                if last and last.continues_in(run):
                    last = last._replace(elements=range(last.elements.start, run.elements.stop))
                    continue
                if last:
                    yield last
                last = run
        if last:
            yield last

    def _runs_of(self, name: str, elements: range, rank: int | None, destination: int) -> Iterator[_Run]:
        """Where the files have these elements of a parameter; if no `rank` has saved them, themselves."""
        if rank is None:
            yield _Run(None, self._places[name][0].unit, name, elements, destination)
            return
        for place in self._places[name]:
            start = max(elements.start, place.elements.start)
            stop = min(elements.stop, place.elements.stop)
            if start < stop:
                moved = place.offset - place.elements.start
                found = range(start + moved, stop + moved)
                yield _Run(rank, place.unit, name, found, destination + start - elements.start)

    def _fill(self, kind: str, name: str, wanted: Part, elements: range, found: Tensor) -> None:
        """Fill `found` with elements of a part of a parameter."""
        rank = same_part(self._sharing.part(name), wanted)

        def read_into(tensor_rank: int, first: int, target: Tensor) -> None:
            for run in self._runs_of(name, range(first, first + len(target)), tensor_rank, 0):
                part = target[run.destination : run.destination + len(run.elements)]
                self._read_into(kind, run.unit, tensor_rank, run.elements.start, part)

        if rank is not None:
            read_into(rank, elements.start, found)
        else:
            shape = self._places[name][0].shape
            fill(found, elements, blocks(shape, self._sharing, name, wanted, elements), read_into)

    def _read_into(self, kind: str, unit: int, tensor_rank: int, first: int, target: Tensor) -> None:
        """Fill `target` with elements of a tensor rank's flat buffer of a unit, from `first` on."""
        shard, filled = self.units[unit]["shard_numel"], 0
        if self.units[unit].get("frozen") and kind not in (WEIGHTS, REFERENCE):
            target.zero_()  # what was not trained had no moments
            return
        while filled < len(target):
            index, start = divmod(first + filled, shard)
            count = min(shard - start, len(target) - filled)
            owner = self._data_ranks.owner_of(index) * self.tensor + tensor_rank
            part = target[filled : filled + count]
            self._file(owner).read_into(tensor_name(kind, unit), start, part, self._pool.map)
            filled += count

    @cached_property
    def _places(self) -> dict[str, list[_Place]]:
        places: dict[str, list[_Place]] = {}
        for index, unit in enumerate(self.units):
            for name, entry in unit["parameters"].items():
                shape = tuple(entry["shape"])
                first = rows_of(entry).start * math.prod(shape[1:])
                elements = range(first, first + math.prod(local_shape(entry, self.tensor)))
                places.setdefault(name, []).append(_Place(elements, index, entry["offset"], shape))
        return places

    def parameters(self) -> dict[str, Tensor]:
        """All weights by the model's names, whole and in fp32, for a program of one process."""
        whole: dict[str, Tensor] = {}
        for index, unit in enumerate(self.units):
            shapes = {name: local_shape(entry, self.tensor) for name, entry in unit["parameters"].items()}
            offsets = {name: entry["offset"] for name, entry in unit["parameters"].items()}
            stop = max((offsets[name] + math.prod(shape) for name, shape in shapes.items()), default=0)
            if stop > sum(entry.size for entry in self._entries.values()):
                raise DamagedFile(f"{self.path / STATE}: a unit of {stop} elements, more than its files hold")
            flats = torch.empty(self.tensor, stop)
            for rank, flat in enumerate(flats):
                self._read_into(WEIGHTS, index, rank, 0, flat)
            for name, shape in shapes.items():
                parts = [flat[offsets[name] :][: math.prod(shape)].view(shape) for flat in flats]
                split, entry = self._sharing.splits.get(name), unit["parameters"][name]
                if "rows" in entry:
                    table = whole.setdefault(name, torch.empty(entry["shape"]))
                    table[rows_of(entry).start : rows_of(entry).stop] = parts[0]
                else:
                    whole[name] = parts[0].clone() if split is None else split.join(parts)
        return whole

    def check_rest(self, reader: int, readers: int) -> None:
        """Check what has not been read yet of every `readers`th file of shards, starting at file `reader`.

        Reader 0 also checks the other files.
        """
        for rank in range(reader, self.ranks, readers):
            self._file(rank).file.check_rest(self._pool.map)
        if reader == 0:
            shards = set(map(shard_file_name, range(self.ranks)))
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
