"""DeepSpeed's checkpoints of Megatron-DeepSpeed's GPT: global_step100/, ZeRO stages 0 to 3, and Universal.

mp_rank_TT_model_states.pt           tensor rank TT's module, whole up to stage 2, and the program's args
layer_NN-model_TT-model_states.pt    the module in parts, if it is DeepSpeed's pipeline module
zero_pp_rank_R_mp_rank_TT_model_states.pt           as the first at stage 3, without weights
[bf16_]zero_pp_rank_R_mp_rank_TT_optim_states.pt    data rank R's part of the fp32 weights
zero/NAME/fp32.pt                    Universal: a whole fp32 weight

fp32 weights are preferred to the module's, which are rounded to the format of the run.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from megatron_zpp.checkpoint.foreign.model import AnyTensor, ForeignModel, ForeignTensor, flatten
from megatron_zpp.checkpoint.foreign.pickled import NotData
from megatron_zpp.checkpoint.foreign.rank_files import foreign_model, read_state
from megatron_zpp.checkpoint.foreign.torch_file import StoredTensor, read_torch_file, sizes_of

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MOST_NAMES = 200_000  # of weights
_MOMENTS = "the optimizer's moments: they start at zero, and the schedule at iteration 0"


def read_zero(path: Path) -> ForeignModel:
    """Return the model of a directory of ZeRO files. Raises ValueError or DamagedFile, in one line."""
    states = {rank: read_state(file) for rank, file in sorted(_first_files(path).items())}
    if not states or sorted(states) != list(range(len(states))):
        raise ValueError(f"{path}: has files of model-parallel ranks {sorted(states)}; copy all of them")
    if any(state.get("frozen_param_shapes") for state in states.values()):
        raise ValueError(
            f"{path}: has frozen parameters, which this program does not train; merge them first"
        )
    pipelined = len({match[2] for match, _ in _named(path, _LAYER)})  # tensor ranks that have layer files
    ranks: list[Mapping[str, AnyTensor]] = []
    left_out = [_MOMENTS]
    if pipelined and pipelined != len(states):  # tensor ranks are not model-parallel ranks
        ranks = [_layers(path, rank) for rank in range(pipelined)]
        left_out.append("fp32 weights: pipeline ranks share them, so weights are those of the layer files")
    elif _optimizer_files(path, 0):
        for rank, state in states.items():
            shares = [_optimizer(file) for file in _optimizer_files(path, rank)]
            ranks.append(_from_shares(path, state, shares))
    else:
        for rank, state in states.items():  # the weights of the module itself, in the format of the run
            module = state.get("module")
            ranks.append(flatten(path, module) if isinstance(module, dict) else _layers(path, rank))
        left_out = ["fp32 weights: there are no optim_states files, so weights are those of the module"]
    return foreign_model("DeepSpeed (ZeRO files)", path, states[0], ranks, left_out)


def read_universal(path: Path) -> ForeignModel:
    """Return the model of a Universal checkpoint. Raises as `read_zero`."""
    files = _first_files(path)
    if 0 not in files:
        raise ValueError(f"{path}: has no mp_rank_00_model_states.pt, which describes the model")
    state = read_state(files[0])
    found: dict[str, AnyTensor] = {}
    for file in sorted((path / "zero").glob("*/fp32.pt")):
        value = read_torch_file(file)
        if isinstance(value, dict):
            value = value.get("param")
        if not isinstance(value, StoredTensor):
            raise ValueError(f"{file}: holds no tensor named param; convert the checkpoint again")
        found[file.parent.name] = value
    return foreign_model("DeepSpeed (Universal)", path, state, [found], [_MOMENTS])


def _named(path: Path, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
    """Return the files of a directory whose names match, in the order of names."""
    return [(match, file) for file in sorted(path.iterdir()) if (match := pattern.fullmatch(file.name))]


def _first_files(path: Path) -> dict[int, Path]:
    """Return the first file of each model-parallel rank; at stage 3 that of its data rank 0."""
    found = [(int(match[2]), file) for match, file in _named(path, _MODEL) if not int(match[1] or 0)]
    return dict(reversed(found))


def _optimizer_files(path: Path, rank: int) -> list[Path]:
    """Return the files of a model-parallel rank's data ranks, in their order. Raises ValueError for a gap."""
    found = {int(match[1]): file for match, file in _named(path, _OPTIMIZER) if int(match[2]) == rank}
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"{path}: has optim_states of data ranks {sorted(found)}; copy all of them")
    return [found[number] for number in range(len(found))]


def _layers(path: Path, rank: int) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for match, file in _named(path, _LAYER):
        if int(match[2]) == rank:
            layer = flatten(file, read_state(file))
            found |= {f"{int(match[1])}.{name}": tensor for name, tensor in layer.items()}
    if not found:
        raise ValueError(f"{path}: has no weights of tensor rank {rank} in model_states or layer files")
    return found


def _optimizer(file: Path) -> Mapping[str, Any]:
    value = read_torch_file(file)
    state = value.get("optimizer_state_dict") if isinstance(value, dict) else None
    if not isinstance(state, dict) or "zero_stage" not in state:
        raise ValueError(f"{file}: has no state of a ZeRO optimizer; copy it again")
    return state


def _from_shares(
    path: Path, state: Mapping[str, Any], shares: Sequence[Mapping[str, Any]]
) -> dict[str, ForeignTensor]:
    """Return fp32 weights that data ranks share."""
    groups = state.get("param_shapes")
    groups = [groups] if isinstance(groups, dict) else groups
    if not groups or not all(isinstance(group, dict) for group in groups):
        raise ValueError(f"{path}: has no param_shapes; save it with DeepSpeed 0.5 or later")
    if sum(map(len, groups)) > _MOST_NAMES:
        raise ValueError(f"{path}: its param_shapes have more than {_MOST_NAMES:,} names")
    try:
        groups = [{name: sizes_of(shape) for name, shape in group.items()} for group in groups]
    except NotData as error:
        raise ValueError(f"{path}: param_shapes {error}; copy it again") from None
    if not shares:
        raise ValueError(f"{path}: has optim_states of some model-parallel ranks only; copy all of them")
    world = shares[0].get("partition_count", len(shares))
    if isinstance(world, list) and world and all(type(one) is int for one in world):
        world = max(world)
    if world != len(shares):
        said = f" of {world}" if type(world) is int else ""
        raise ValueError(f"{path}: has optim_states of {len(shares)}{said} data ranks; copy all of them")
    found: dict[str, ForeignTensor] = {}
    if _number(shares[0]["zero_stage"]) == 3:  # a rank has an equal part of each parameter, the last padded
        groups_of_ranks, offset = [_tensors(path, share, "fp32_flat_groups") for share in shares], 0
        flats = [(tensors, _ends(tensors)) for tensors in groups_of_ranks]
        for name, shape in (pair for group in groups for pair in group.items()):
            size = math.prod(shape)
            share = -(-size // len(flats))
            sizes = [max(0, min(share, size - rank * share)) for rank in range(len(flats))]
            cuts = [_slice(*flat, offset, length) for flat, length in zip(flats, sizes, strict=True)]
            found[name] = _joined(path, name, shape, [part for cut in cuts for part in cut])
            offset += share
        return found
    flat_groups = [_tensors(path, share, "single_partition_of_fp32_groups") for share in shares]
    if any(len(part) != len(groups) for part in flat_groups):
        raise ValueError(f"{path}: its optim_states have other groups of parameters than its model_states")
    for group, *whole in zip(groups, *flat_groups, strict=True):
        ends, offset = _ends(whole), 0
        for name, shape in group.items():
            size = math.prod(shape)
            found[name] = _joined(path, name, shape, _slice(whole, ends, offset, size))
            offset += size
    return found


def _number(stage: Any) -> int:
    """Return a stage, which may be an enum's member."""
    arguments = getattr(stage, "arguments", None)
    return int(arguments[0] if arguments else stage)


def _tensors(path: Path, share: Mapping[str, Any], key: str) -> list[StoredTensor]:
    found = share.get(key)
    if not isinstance(found, list) or not all(isinstance(one, StoredTensor) for one in found):
        raise ValueError(f"{path}: an optim_states file has no {key}; save it with DeepSpeed 0.5 or later")
    return found


def _ends(tensors: Sequence[StoredTensor]) -> list[int]:
    """Return where each of flat tensors ends if they lie end to end."""
    return list(accumulate(math.prod(tensor.shape) for tensor in tensors))


def _slice(
    tensors: Sequence[StoredTensor], ends: Sequence[int], start: int, length: int
) -> list[StoredTensor]:
    """Return what flat tensors, end to end, have of `length` elements from `start` on, part by part."""
    found, at = [], bisect_right(ends, start)  # a file may have very many of them
    while length and at < len(tensors):
        tensor, taken = tensors[at], min(length, ends[at] - start)
        first = math.prod(tensor.shape) - (ends[at] - start)
        if taken:
            found.append(StoredTensor(tensor.storage, (taken,), (1,), tensor.offset + first))
        start, length, at = start + taken, length - taken, at + 1
    return found


def _joined(path: Path, name: str, shape: tuple[int, ...], parts: Sequence[StoredTensor]) -> ForeignTensor:
    """Return the tensor that flat parts make up. Raises ValueError for fewer elements than it has."""
    if sum(part.shape[0] for part in parts) < math.prod(shape):
        raise ValueError(f"{path}: its optim_states end before {name} does; copy all of them")
    return ForeignTensor(
        shape, lambda: torch.cat([part.read() for part in parts] or [torch.empty(0)]).view(shape)
    )
