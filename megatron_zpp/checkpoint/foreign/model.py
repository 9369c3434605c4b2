"""A model as another program saved it: what describes it, and its tensors, which are read one by one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron_zpp.checkpoint.foreign.names import our_names, split_of
from megatron_zpp.checkpoint.foreign.pickled import NotData
from megatron_zpp.checkpoint.foreign.torch_file import StoredTensor
from megatron_zpp.placement import Placement

_LARGEST_COPY = 1 << 24  # elements of a tensor that all ranks have, up to which the copies are compared

_MOST_VALUES = 200_000  # dictionaries and tensors in each other; a model of 10,000 tensors has some 20,000
_LONGEST_NAME = 1_000  # characters


@dataclass(frozen=True)
class ForeignTensor:
    """A whole parameter; `read` returns it in the format it was saved in. `name` is its name there."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    name: str = ""


AnyTensor: TypeAlias = ForeignTensor | StoredTensor  # the second is whole in a file


@dataclass(frozen=True)
class ForeignModel:
    """A checkpoint of another program.

    kind       the program and its layout, in words
    path       the directory of this iteration
    args       the program's settings by name, which describe the model
    iteration  as the checkpoint itself says; None if it does not
    tensors    by our parameters' names, with the program's order of rows in attention.qkv
    left_out   lines: what is not imported, and why
    """

    kind: str
    path: Path
    args: Mapping[str, Any]
    iteration: int | None
    tensors: Mapping[str, ForeignTensor]
    left_out: tuple[str, ...] = field(default=())


def flatten(file: Path, value: Mapping[Any, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of nested dictionaries by their keys, joined by points; other values are dropped.

    Raises NotData, which names `file`, for more values or longer names than a model has, as of dictionaries
    that share others.
    """
    found: dict[str, StoredTensor] = {}
    waiting: list[tuple[str, Any]] = [("", value)]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return found
        name, inner = waiting.pop()
        if isinstance(inner, Mapping):
            below = []
            for key, part in inner.items():
                if isinstance(part, Mapping | StoredTensor):
                    below.append((f"{name}.{key}" if name else f"{key}", part))
                    if len(below[-1][0]) > _LONGEST_NAME:
                        raise NotData(f"{file}: has a name of more than {_LONGEST_NAME:,} characters")
            waiting += reversed(below)
            if len(waiting) > _MOST_VALUES:
                break
        elif isinstance(inner, StoredTensor):
            found[name] = inner
    raise NotData(f"{file}: has dictionaries in each other to more than {_MOST_VALUES:,} values")


def join_ranks(
    path: Path, ranks: Sequence[Mapping[str, AnyTensor]], *, gated: bool
) -> tuple[dict[str, ForeignTensor], list[str]]:
    """Return whole parameters by our names, from the tensors of each tensor rank; and what was left out.

    Raises ValueError for tensors that are no part of our model, and for ranks that do not fit together.
    """
    names, left_out = our_names(path, ranks[0])
    joined = {}
    for theirs, ours in names.items():
        parts = []
        for number, rank in enumerate(ranks):
            if theirs not in rank:
                raise ValueError(f"{path}: tensor rank {number} has no {theirs}, which rank 0 has")
            parts.append(rank[theirs])
        if len({part.shape for part in parts}) > 1:
            raise ValueError(f"{path}: tensor ranks have {theirs} in different shapes")
        whole = parts[0] if len(parts) == 1 else _joined(path, theirs, ours, parts, gated)
        joined[ours] = ForeignTensor(whole.shape, whole.read, theirs)
    return joined, left_out


def _joined(path: Path, theirs: str, ours: str, parts: list[AnyTensor], gated: bool) -> ForeignTensor:
    split = split_of(ours, parts[0].shape, len(parts), gated=gated)
    if split is not None:
        whole = Placement(name=ours, shape=split.whole_shape(parts[0].shape), split=split)
        return ForeignTensor(whole.shape, lambda: _join(whole, parts))

    def read() -> Tensor:
        first = parts[0].read()
        for number, part in enumerate(parts[1:], start=1):
            if first.numel() <= _LARGEST_COPY and not torch.equal(first, part.read()):
                raise ValueError(
                    f"{path}: {theirs} differs between tensor ranks 0 and {number}, which should have copies"
                )
        return first

    return ForeignTensor(parts[0].shape, read)


def _join(whole: Placement, parts: list[AnyTensor]) -> Tensor:
    """The parameter of whose parts each tensor rank has one."""
    read = [part.read() for part in parts]
    joined = torch.empty(whole.shape, dtype=reduce(torch.promote_types, (part.dtype for part in read)))
    for rank, part in enumerate(read):
        for here, there in whole.parts(rank):
            joined[there] = part[here]
    return joined
