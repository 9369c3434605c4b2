"""Reads a checkpoint into an engine of any stage and number of ranks, and checks all of its bytes."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_zpp.checkpoint.directory import checkpoint_path, iteration_of
from megatron_zpp.checkpoint.manifest import read_manifest
from megatron_zpp.checkpoint.shard_file import ShardFile
from megatron_zpp.checkpoint.states import Progress, check_state, describe_units, tensor_name
from megatron_zpp.checkpoint.write import STATE, shard_file_name
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.checksums import DamagedFile, OnProgress, no_report, verify_file
from megatron_zpp.storage.regular import read_limited
from megatron_zpp.tokenizer.base import in_words
from megatron_zpp.zero.engine import REFERENCE, WEIGHTS, ZeroEngine
from megatron_zpp.zero.flat_layout import FlatLayout

STATE_LIMIT = 64 << 20  # bytes of state.json: 200 per parameter for 300,000 parameters, and the settings
_THREADS = 4  # that read and check chunks; both release the GIL


class _Run(NamedTuple):
    """Elements of a saved unit's flat buffer, and the first element of the result where they belong."""

    unit: int
    elements: range
    destination: int


class CheckpointReader:
    """A committed checkpoint. Use it in a `with` block.

    `on_progress` is called after every chunk, by any thread.

    Raises DamagedFile, with file and position, if anything differs from what was written; ValueError for an
    unknown version of the format, and if the directory's name and content have different iterations.
    """

    def __init__(self, path: Path, on_progress: OnProgress = no_report) -> None:
        self.path, self._on_progress = path, on_progress
        self._checksums = read_manifest(path)
        if STATE not in self._checksums:
            raise DamagedFile(f"{path}: its manifest does not name {STATE}")
        if self._checksums[STATE].size > STATE_LIMIT:
            raise DamagedFile(f"{path / STATE}: is longer than {STATE_LIMIT:,} bytes")
        verify_file(path / STATE, self._checksums[STATE])
        try:
            self.state: dict[str, Any] = json.loads(read_limited(path / STATE, STATE_LIMIT))
            check_state(self.state)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedFile(f"{path / STATE}: not the state of a run ({error!r})") from None
        named, held = iteration_of(path), self.state["progress"]["iteration"]
        if named is not None and named != held:
            fix = f"rename it to {checkpoint_path(path.parent, held).name}, or move it away"
            raise ValueError(f"{path}: holds iteration {held}, not {named}; {fix}")
        self.units: list[dict[str, Any]] = self.state["units"]
        self.ranks: int = self.state["ranks"]
        self._grid = Topology(0, self.ranks, 0, self.ranks // self.state.get("nodes", 1))
        self._files: dict[int, ShardFile] = {}
        self._pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="checkpoint")

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.file.close()

    def has_file(self, name: str) -> bool:
        """Whether the manifest names a file."""
        return name in self._checksums

    def check_file(self, name: str) -> None:
        """Check all bytes of a file that the manifest names. Raises DamagedFile."""
        verify_file(self.path / name, self._checksums[name], on_progress=self._on_progress)

    def config(self) -> Config:
        """The settings of the run that wrote the checkpoint."""
        try:
            return Config.from_json(self.state["config"])
        except ValueError as error:
            raise DamagedFile(f"{self.path / STATE}: {error}") from None

    def elements(self, kind: str, unit: int, elements: range) -> Tensor:
        """Elements of a unit's flat fp32 buffer of weights or a moment, (len(elements),) on the CPU."""
        found = torch.empty(len(elements))
        shard = self.units[unit]["shard_numel"]
        position = elements.start
        while position < elements.stop:
            index, first = divmod(position, shard)
            count = min(shard - first, elements.stop - position)
            place = position - elements.start
            self._file(self._grid.owner_of(index)).read_into(
                tensor_name(kind, unit), first, found[place : place + count], self._pool.map
            )
            position += count
        return found

    def shard_elements(self, kind: str, names: Sequence[str], layout: FlatLayout, elements: range) -> Tensor:
        """Elements of the flat fp32 buffer of parameters `names` in `layout`, (len(elements),) on the CPU.

        They are found by parameter and slice, wherever the saved units have them. Gaps are zero.
        """
        found = torch.zeros(len(elements))
        for saved in self._runs(names, layout, elements):
            found[saved.destination : saved.destination + len(saved.elements)] = self.elements(
                kind, saved.unit, saved.elements
            )
        return found

    def _runs(self, names: Sequence[str], layout: FlatLayout, elements: range) -> Iterator["_Run"]:
        """Where the file has these elements; parameters that are adjacent in both form one run."""
        run = None
        for piece in layout.pieces(elements):
            unit, offset = self._places[names[piece.parameter]]
            start = offset + piece.start
            if run and run.unit == unit and start - run.elements.start == piece.destination - run.destination:
                run = run._replace(elements=range(run.elements.start, start + piece.length))
                continue
            if run:
                yield run
            run = _Run(unit, range(start, start + piece.length), piece.destination)
        if run:
            yield run

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """The unit of each parameter, and the parameter's first element in the unit."""
        return {
            name: (index, entry["offset"])
            for index, unit in enumerate(self.units)
            for name, entry in unit["parameters"].items()
        }

    def parameters(self) -> dict[str, Tensor]:
        """All weights by the model's names, whole and in fp32, for a program of one process."""
        whole = {}
        for index, unit in enumerate(self.units):
            described = unit["parameters"]
            numels = {name: _numel(entry["shape"]) for name, entry in described.items()}
            stop = max((entry["offset"] + numels[name] for name, entry in described.items()), default=0)
            if stop > sum(checksums.size for checksums in self._checksums.values()):
                raise DamagedFile(f"{self.path / STATE}: a unit of {stop} elements, more than its files hold")
            flat = self.elements(WEIGHTS, index, range(stop))
            for name, entry in described.items():
                offset = entry["offset"]
                whole[name] = flat[offset : offset + numels[name]].view(entry["shape"]).clone()
        return whole

    def check_rest(self, reader: int, readers: int) -> None:
        """Check what has not been read yet of every `readers`th file of shards, starting at file `reader`.

        Reader 0 also checks the other files.
        """
        for rank in range(reader, self.ranks, readers):
            self._file(rank).file.check_rest(self._pool.map)
        if reader == 0:
            shards = set(map(shard_file_name, range(self.ranks)))
            for name in self._checksums.keys() - shards - {STATE}:
                self.check_file(name)

    def _file(self, rank: int) -> ShardFile:
        if rank not in self._files:
            name = shard_file_name(rank)
            if name not in self._checksums:
                raise DamagedFile(f"{self.path}: its manifest does not name {name}")
            self._files[rank] = ShardFile(self.path / name, self._checksums[name], self._on_progress)
        return self._files[rank]


def load_checkpoint(
    path: Path,
    engine: ZeroEngine,
    tokenizer: dict[str, Any],
    *,
    with_optimizer: bool,
    on_progress: OnProgress = no_report,
) -> Progress:
    """Load a checkpoint's states into the engine, and return its progress.

    Every rank reads what it owns, and together the ranks check all files. Raises DamagedFile, and ValueError
    if model or tokenizer differ. After either error the engine's states are undefined until another
    checkpoint is loaded. Nothing is sent, so ranks may fail independently.
    """
    with CheckpointReader(path, on_progress) as reader:
        _check_tokenizer(path, reader.state["tokenizer"], tokenizer)
        _check_units(path, reader.units, describe_units(engine))
        _load(WEIGHTS, reader, engine)
        if with_optimizer:
            if not reader.state["with_optimizer"] and reader.state["optimizer_steps"]:
                raise ValueError(f"{path}: saved with --no-save-optim; add --no-load-optim")
            for kind in engine.state_kinds[1:]:
                if kind == REFERENCE:
                    if kind in reader.state.get("kinds", []):  # otherwise the reference starts as the weights
                        _load(kind, reader, engine)
                elif reader.state["with_optimizer"]:
                    _load(kind, reader, engine)
                else:  # imported weights: no step has been taken, so the moments are zero
                    engine.load_states(kind, lambda unit, elements: torch.zeros(len(elements)))
            has_references = REFERENCE in reader.state.get("kinds", [])
            formats = reader.state.get("difference_formats") if has_references else None
            engine.load_difference_formats_state(formats)
            engine.load_optimizer_steps(reader.state["optimizer_steps"])
            engine.loss_scale.load_state(reader.state["loss_scale"])
        reader.check_rest(engine.topology.rank, engine.topology.world_size)
        progress = Progress.from_json(reader.state["progress"])
        engine.iteration = progress.iteration
        return progress


def saved_settings(path: Path) -> tuple[dict[str, Any], int]:
    """(settings by part and field, ranks) of the run that saved a checkpoint, after it was loaded."""
    state = json.loads(read_limited(path / STATE, STATE_LIMIT))
    return state["config"], state["ranks"]


def _load(kind: str, reader: CheckpointReader, engine: ZeroEngine) -> None:
    def read(index: int, elements: range) -> Tensor:
        unit = engine.units[index]
        return reader.shard_elements(kind, unit.names, unit.layout, elements)

    engine.load_states(kind, read)


def _check_tokenizer(path: Path, saved: dict[str, Any], present: dict[str, Any]) -> None:
    if saved != present:
        raise ValueError(
            f"{path}: was trained with {in_words(saved)}, this run has {in_words(present)}; give the "
            "tokenizer flags of that run"
        )


def _check_units(path: Path, saved: list[dict[str, Any]], present: list[dict[str, Any]]) -> None:
    """Raise ValueError unless both have the same parameters; their layouts may differ."""
    theirs, ours = (
        {name: entry for unit in units for name, entry in unit["parameters"].items()}
        for units in (saved, present)
    )
    for name in sorted(theirs.keys() ^ ours.keys()):
        where = "missing from it" if name in ours else "not part of this model"
        raise ValueError(f"{path}: {name} is {where}; use the model flags that it was saved with")
    for name, entry in ours.items():
        if theirs[name]["shape"] != entry["shape"]:
            shapes = tuple(theirs[name]["shape"]), tuple(entry["shape"])
            raise ValueError(
                f"{path}: {name} has shape {shapes[0]}, this model needs {shapes[1]}; use the model flags "
                "that it was saved with"
            )


def _numel(shape: list[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
