"""Megatron-LM's old layout: iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt, a file per rank."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.foreign.model import AnyTensor, ForeignModel, flatten, join_ranks
from megatron_zpp.checkpoint.foreign.pickled import Global, Record
from megatron_zpp.checkpoint.foreign.torch_file import read_torch_file

KIND = "Megatron-LM (mp_rank files)"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"(.*\.layers\.)(\d+)(\..+)")
LEFT_OUT_OPTIMIZER = (
    "the optimizer's state, with its fp32 weights: moments start at zero, weights are the model's own, and "
    "the schedule starts at iteration 0"
)
_SCALARS = (bool, int, float, str, Global)
_LONGEST_SETTING = 10_000  # entries
_NESTED = "of several values"  # for a value of values: no setting of a model is one, and it may be endless
_OLDEST = 2.0  # older ones have the rows of queries, keys and values in another order


def read_rank_files(path: Path) -> ForeignModel:
    """Return the model of an iteration's directory. Raises ValueError or DamagedFile, in one line."""
    grid = _grid(path)
    tensor = 1 + max(rank for rank, _ in grid)
    pipeline = 1 + max(stage for _, stage in grid)
    if missing := [
        (rank, stage) for rank in range(tensor) for stage in range(pipeline) if (rank, stage) not in grid
    ]:
        raise ValueError(f"{path}: has no file of tensor rank {missing[0][0]}, pipeline rank {missing[0][1]}")
    first: dict[str, Any] | None = None
    ranks: list[Mapping[str, AnyTensor]] = []
    for rank in range(tensor):
        whole: dict[str, AnyTensor] = {}
        for stage in range(pipeline):
            file = grid[rank, stage]
            state = _read(file)
            first = first or state
            _add_stage(path, whole, flatten(file, state["model"]))
        ranks.append(whole)
    assert first is not None
    has_optimizer = {"optimizer", "opt_param_scheduler"} & first.keys()
    return foreign_model(KIND, path, first, ranks, [LEFT_OUT_OPTIMIZER] if has_optimizer else [])


def foreign_model(
    kind: str,
    path: Path,
    state: Mapping[str, Any],
    ranks: Sequence[Mapping[str, AnyTensor]],
    left_out: Sequence[str],
) -> ForeignModel:
    """Return the model that `state` describes, of the tensors of each tensor rank by their names there."""
    args = settings_of(state.get("args"))
    tensors, lines = join_ranks(path, ranks, gated=bool(args.get("swiglu")))
    numbers = (state.get(name) for name in ("iteration", "global_steps"))
    iteration = next((number for number in numbers if type(number) is int), None)
    return ForeignModel(kind, path, args, iteration, tensors, (*left_out, *lines))


def settings_of(args: Any) -> dict[str, Any]:
    """Return what an argparse.Namespace held; empty if it is none. Values in values are not shown."""
    fields = args.fields if isinstance(args, Record) else args
    return {name: _plain(value) for name, value in fields.items()} if isinstance(fields, dict) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        simple = len(value) <= _LONGEST_SETTING and all(isinstance(one, _SCALARS) for one in value)
        return value if simple else _NESTED
    if isinstance(value, Record):  # an enum's member
        return value if all(isinstance(one, _SCALARS) for one in value.arguments) else _NESTED
    return value if isinstance(value, _SCALARS) or value is None else _NESTED


def read_state(file: Path) -> dict[str, Any]:
    """Return the dictionary in a file of torch.save's. Raises ValueError if it holds another value."""
    state = read_torch_file(file)
    if not isinstance(state, dict):
        raise ValueError(f"{file}: holds no dictionary; copy it again")
    return state


def _grid(path: Path) -> dict[tuple[int, int], Path]:
    found = {}
    for folder in sorted(path.glob("mp_rank_*")):
        match = _RANK.fullmatch(folder.name)
        if match is None:
            raise ValueError(f"{folder}: of a model with experts, which this program does not have")
        file = next((folder / name for name in _FILES if (folder / name).exists()), None)
        if file is None:
            raise ValueError(f"{folder}: has no {_FILES[0]}; copy the checkpoint again")
        found[int(match[1]), int(match[2] or 0)] = file
    if not found:
        raise ValueError(f"{path}: has no mp_rank_00; name the directory that has it")
    return found


def _read(file: Path) -> dict[str, Any]:
    state = read_state(file)
    if not isinstance(state.get("model"), dict):
        reason = "has interleaved pipeline stages (model0, model1)" if "model0" in state else "has no model"
        raise ValueError(f"{file}: {reason}; save it again with megatron's tools/checkpoint/convert.py")
    version = _plain(state.get("checkpoint_version", 0))
    if not isinstance(version, int | float) or version < _OLDEST:
        fix = f"load and save it with a Megatron-LM of 2021 or later, which writes {_OLDEST} or later"
        raise ValueError(f"{file}: checkpoint_version {version!s:.20}; {fix}")
    return state


def _add_stage(path: Path, whole: dict[str, AnyTensor], stage: Mapping[str, AnyTensor]) -> None:
    """Add a pipeline stage's tensors, whose layers are numbered from 0 in each stage."""
    before = {int(match[2]) for name in whole if (match := _LAYER.fullmatch(name))}
    for name, tensor in stage.items():
        match = _LAYER.fullmatch(name)
        if match:
            name = f"{match[1]}{int(match[2]) + len(before)}{match[3]}"
        if name in whole and "word_embeddings" not in name:
            raise ValueError(f"{path}: two pipeline ranks have {name}")
        whole.setdefault(name, tensor)
