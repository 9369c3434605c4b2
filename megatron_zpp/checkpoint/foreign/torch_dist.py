"""Megatron-LM's torch_dist layout: common.pt, and .metadata, which finds tensors in .distcp files."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.foreign.model import ForeignModel, ForeignTensor
from megatron_zpp.checkpoint.foreign.pickled import NotData
from megatron_zpp.checkpoint.foreign.rank_files import LEFT_OUT_OPTIMIZER, foreign_model, read_state
from megatron_zpp.checkpoint.foreign.torch_file import (
    StoredTensor,
    read_pickle_file,
    read_torch_file,
    sizes_of,
)
from megatron_zpp.config.values.json_file import read_json_object
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.regular import is_name

KIND = "Megatron-LM (torch_dist)"
_STACKED = re.compile(r"(.*\.layers\.)(?!\d)(.+)")  # all layers in one tensor, along a first axis
_MOST_BLOCKS = 500_000  # of tensors and their layers; a model of 10,000 tensors on 8 ranks has some 80,000
_NOT_WEIGHTS = re.compile(r"(optimizer|rng_state|chained_\d+|rerun_state).*")


@dataclass(frozen=True)
class _Chunk:
    """A block of a tensor: where it begins in the tensor, and in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


def read_torch_dist(path: Path) -> ForeignModel:
    """Return the model of an iteration's directory. Raises ValueError or DamagedFile, in one line."""
    backend = read_json_object("DIRECTORY", str(path / "metadata.json")).get("sharded_backend")
    if backend != "torch_dist":
        fix = "save it again with --dist-ckpt-format torch_dist"
        raise ValueError(f"{path}: its sharded_backend is {backend!s:.30}; {fix}")
    common = read_state(path / "common.pt")
    source = path / ".metadata"
    metadata = read_pickle_file(source)
    try:
        tensors = _tensors(source, metadata.fields)
    except (NotData, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{source}: not the metadata of a checkpoint ({error!r:.100})") from None
    weights: dict[str, ForeignTensor] = {}
    left_out: set[str] = set()
    for name, (shape, chunks) in tensors.items():
        if _NOT_WEIGHTS.fullmatch(name):
            if name.startswith(("optimizer", "chained")):
                left_out.add(LEFT_OUT_OPTIMIZER)
        elif match := _STACKED.fullmatch(name):
            if "_extra_state" in name:
                continue
            if not shape or shape[0] * max(len(chunks), 1) > _MOST_BLOCKS:
                raise ValueError(f"{source}: {name} has more layers than any model")
            for layer in range(shape[0]):
                weights[f"{match[1]}{layer}.{match[2]}"] = _tensor(path, name, shape, chunks, layer)
        else:
            weights[name] = _tensor(path, name, shape, chunks, None)
    return foreign_model(KIND, path, common, [weights], [*left_out])


def _tensors(source: Path, metadata: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], list[_Chunk]]]:
    """Return the whole shape of each tensor of the .metadata `source`, and its chunks."""
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, info in metadata["storage_data"].items():
        if (offset := index.fields.get("offset")) is not None:
            places.setdefault(index.fields["fqn"], {})[sizes_of(offset)] = info.fields
    tensors: dict[str, tuple[tuple[int, ...], list[_Chunk]]] = {}
    count = 0
    for name, entry in metadata["state_dict_metadata"].items():
        if "size" not in entry.fields:  # bytes: extra states and random numbers' states
            continue
        shape, chunks = sizes_of(entry.fields["size"]), list[_Chunk]()
        tensors[name] = shape, chunks
        count += len(entry.fields["chunks"])
        if count > _MOST_BLOCKS:
            raise ValueError(f"{source}: has more than {_MOST_BLOCKS:,} blocks of tensors")
        for record in entry.fields["chunks"]:
            offsets, sizes = sizes_of(record.fields["offsets"]), sizes_of(record.fields["sizes"])
            info = places[name][offsets]
            file = info["relative_path"]
            if not is_name(file):
                raise ValueError(f"{source}: names a file outside of the checkpoint: {file!r:.60}")
            if info.get("transform_descriptors"):
                raise ValueError(
                    f"{source.parent}: {name} is compressed in its file; save it without compression"
                )
            spans = zip(offsets, sizes, shape, strict=True)
            if any(begin + length > whole for begin, length, whole in spans):
                raise DamagedFile(f"{source}: {name} has a block outside of its shape {shape}")
            place = source.with_name(file), int(info["offset"]), int(info["length"])
            chunks.append(_Chunk(offsets, sizes, *place))
    return tensors


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], chunks: Sequence[_Chunk], layer: int | None
) -> ForeignTensor:
    """Return a tensor, or what it has of one layer."""
    if layer is not None:
        chunks = [one for one in chunks if one.offsets[0] <= layer < one.offsets[0] + one.sizes[0]]
    whole = shape if layer is None else shape[1:]

    def read() -> Tensor:
        found: Tensor | None = None
        covered = 0
        there = sum(file.stat().st_size for file in {chunk.file for chunk in chunks} if file.is_file())
        if math.prod(whole) > there:
            raise DamagedFile(f"{path}: {name} has {math.prod(whole)} elements, and its files {there} bytes")
        for chunk in chunks:
            stored = read_torch_file(chunk.file, chunk.start, chunk.length)
            if not isinstance(stored, StoredTensor) or stored.shape != chunk.sizes:
                raise DamagedFile(f"{chunk.file}: {name} is not the block of it that .metadata describes")
            block, offsets = stored.read(), chunk.offsets
            if layer is not None:
                block, offsets = block[layer - offsets[0]], offsets[1:]
            if found is None:
                found = torch.empty(whole, dtype=block.dtype)
            places = tuple(slice(at, at + size) for at, size in zip(offsets, block.shape, strict=True))
            found[places] = block
            covered += block.numel()
        if found is None or covered != math.prod(whole):
            raise DamagedFile(f"{path}: its files have {covered} of {math.prod(whole)} elements of {name}")
        return found

    return ForeignTensor(whole, read)
