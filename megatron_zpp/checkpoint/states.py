"""The states of an engine and a run that a checkpoint contains, and checks of state.json.

Files contain shards as the ranks have them: `weights/unit_3` is one rank's shard of unit 3's flat buffer.
The offset of a parameter in a flat buffer depends on the model and on the largest quantisation block of the
run, and is stored in state.json. A rank of another run reads the slices of parameters that it owns from the
shards that contain them. At stage 0 every rank writes an equal part of the states, which all ranks have.

state.json contains the rest:
    progress, with_optimizer, optimizer_steps, loss_scale, tokenizer, config
    ranks, nodes   the grid of the run, which determines whose file has a shard (`Topology.owner_of`);
             without `nodes`, in older versions, rank r owns shard r
    units    for each unit: `shard_numel`, elements of a shard; `parameters`: `shape` and `offset` by name
    kinds    states in the files for each unit: `engine.state_kinds`, or `weights` only; absent in older
             versions, which had the weights and, if `with_optimizer`, AdamW's moments
    difference_formats   which units send weight differences in 8 bits next, and what decides on the step
             after: `raised` and `measured` by unit; null where the run sends none, absent in older versions
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from megatron_zpp.data.dataset_progress import DatasetProgress
from megatron_zpp.zero.engine import WEIGHTS, ZeroEngine
from megatron_zpp.zero.flat_layout import FlatLayout

_LIMIT = 2**48  # of any count of samples or elements
_LOSS_SCALE_KEYS = ("dynamic", "scale", "clean_steps", "patience")


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Dropout and data order follow from the seed and these counts.

    `run` is the run's name in logs, which a resumed run keeps. `dataset_progress` is how far the run has read
    each of its data sets; None if it reads none. `skipped_iterations` and `skipped_samples` count steps that
    did not change the weights; they are 0 in checkpoints of older versions. `ordered_samples` is the number
    of samples for which Megatron-LM's order was built; None for other orders, and in older versions.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    skipped_samples: int = 0
    ordered_samples: int | None = None
    run: str = ""
    dataset_progress: DatasetProgress | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Progress":
        """The inverse of `asdict`. Raises ValueError, KeyError or TypeError for other values."""
        value = dict(value)
        if "standing" in value:  # its name in format version 2
            value["dataset_progress"] = value.pop("standing")
        data = value.get("dataset_progress")
        return cls(**value | {"dataset_progress": None if data is None else DatasetProgress.from_json(data)})


def tensor_name(kind: str, unit: int) -> str:
    """The name of a unit's shard in a rank's file."""
    return f"{kind}/unit_{unit}"


def saved_kinds(engine: ZeroEngine, *, with_optimizer: bool) -> tuple[str, ...]:
    """The kinds of states that a checkpoint has of each unit."""
    return engine.state_kinds if with_optimizer else (WEIGHTS,)


def shards_of(engine: ZeroEngine, *, with_optimizer: bool) -> dict[str, Tensor]:
    """This rank's shards by name: the engine's memory, which optimizer steps change, not copies."""
    kinds = saved_kinds(engine, with_optimizer=with_optimizer)
    return {
        tensor_name(kind, index): shard for kind in kinds for index, shard in enumerate(engine.shards(kind))
    }


def describe_state(
    engine: ZeroEngine,
    progress: Progress,
    *,
    with_optimizer: bool,
    config: dict[str, Any],
    tokenizer: dict[str, Any],
) -> dict[str, Any]:
    """The content of state.json; every rank must call it. Waits for the device."""
    return describe_state_of(
        progress,
        with_optimizer=with_optimizer,
        optimizer_steps=engine.optimizer_steps,
        loss_scale=engine.loss_scale.state(),
        ranks=engine.topology.world_size,
        nodes=engine.topology.nodes,
        units=describe_units(engine),
        kinds=saved_kinds(engine, with_optimizer=with_optimizer),
        difference_formats=engine.difference_formats_state() if with_optimizer else None,
        tokenizer=tokenizer,
        config=config,
    )


def describe_state_of(
    progress: Progress,
    *,
    with_optimizer: bool,
    optimizer_steps: int,
    loss_scale: dict[str, float],
    ranks: int,
    nodes: int,
    units: list[dict[str, Any]],
    kinds: Sequence[str],
    tokenizer: dict[str, Any],
    config: dict[str, Any],
    difference_formats: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of state.json, for a program without an engine."""
    return {
        "progress": asdict(progress),
        "with_optimizer": with_optimizer,
        "optimizer_steps": optimizer_steps,
        "loss_scale": loss_scale,
        "ranks": ranks,
        "nodes": nodes,
        "units": units,
        "kinds": list(kinds),
        "difference_formats": difference_formats,
        "tokenizer": tokenizer,
        "config": config,
    }


def check_state(state: dict[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError for a state that `describe_state` cannot have returned."""
    progress = Progress.from_json(state["progress"])
    if type(progress.run) is not str:
        raise ValueError(f"the run is called {progress.run!r}")
    numbers = [
        progress.iteration,
        progress.consumed_samples,
        progress.skipped_iterations,
        progress.skipped_samples,
        0 if progress.ordered_samples is None else progress.ordered_samples,
        state["optimizer_steps"],
    ]
    if not all(type(number) is int and 0 <= number < _LIMIT for number in numbers):
        raise ValueError("progress has values that are not numbers")
    if not (
        progress.skipped_iterations <= progress.iteration
        and progress.skipped_samples <= progress.consumed_samples
    ):
        raise ValueError("more steps were skipped than taken")
    if progress.dataset_progress and progress.dataset_progress.since > progress.consumed_samples:
        raise ValueError(f"its weights begin at sample {progress.dataset_progress.since}")
    for key, kind in (("with_optimizer", bool), ("tokenizer", dict), ("config", dict)):
        if type(state[key]) is not kind:
            raise ValueError(f"{key} is {state[key]!r}")
    if not all(type(kind) is str for kind in state.get("kinds", [])):
        raise ValueError(f"kinds is {state['kinds']!r}")
    _check_difference_formats(state.get("difference_formats"), len(state["units"]))
    scale = state["loss_scale"]
    if not all(isinstance(scale[key], int | float) for key in _LOSS_SCALE_KEYS):
        raise ValueError("loss_scale has values that are not numbers")
    sizes = [
        state["ranks"],
        state.get("nodes", 1),
        *(unit["shard_numel"] for unit in state["units"]),
    ]
    if not all(type(size) is int and 0 < size < _LIMIT for size in sizes):
        raise ValueError(f"ranks, nodes and elements of shards are {sizes}")
    if state["ranks"] % state.get("nodes", 1):
        raise ValueError(f"{state['ranks']} ranks on {state['nodes']} nodes")
    for unit in state["units"]:
        for entry in unit["parameters"].values():
            if not all(
                type(size) is int and 0 <= size < _LIMIT for size in (*entry["shape"], entry["offset"])
            ):
                raise ValueError(f"a parameter is {entry}")


def _check_difference_formats(state: Any, units: int) -> None:
    if state is None:
        return
    raised, measured = state["raised"], state["measured"]
    if not len(raised) == len(measured) == units or not all(type(unit) is bool for unit in raised):
        raise ValueError(f"difference_formats has {raised!r} raised")
    if not all(type(square) is float for squares in measured for square in squares):
        raise ValueError("difference_formats has measurements that are not numbers")
    if not all(len(squares) == 2 for squares in measured):
        raise ValueError("difference_formats has other than two sums per unit")


def describe_units(engine: ZeroEngine) -> list[dict[str, Any]]:
    """The offsets and shapes of each unit's parameters, and the elements of its shards."""
    return [
        describe_unit(dict(zip(unit.names, unit.parameters, strict=True)), unit.layout)
        for unit in engine.units
    ]


def describe_unit(parameters: Mapping[str, Tensor], layout: FlatLayout) -> dict[str, Any]:
    """The same of one unit; `parameters` are in the order of its flat buffer."""
    return {
        "shard_numel": layout.shard_numel,
        "parameters": {
            name: {"shape": list(parameter.shape), "offset": offset}
            for (name, parameter), offset in zip(parameters.items(), layout.offsets, strict=False)
        },
    }
