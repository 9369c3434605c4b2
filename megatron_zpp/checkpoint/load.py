"""Loads a checkpoint into an engine of any stage, data and tensor ranks."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read import STATE_LIMIT, CheckpointReader
from megatron_zpp.checkpoint.same_model import check_tokenizer, check_units
from megatron_zpp.checkpoint.states import describe_buffers, describe_units, formats_of_units, saved_mesh
from megatron_zpp.checkpoint.write import STATE
from megatron_zpp.model.gpt import GPT
from megatron_zpp.storage.checksums import OnProgress, no_report
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.regular import read_limited
from megatron_zpp.zero.adamw import MOMENTS
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import MOMENTUM, REFERENCE, WEIGHTS, may_lack, sources_of


def load_checkpoint(
    path: Location,
    engine: ZeroEngine,
    tokenizer: dict[str, Any] | None,
    *,
    with_optimizer: bool,
    on_progress: OnProgress = no_report,
) -> Progress:
    """Load a checkpoint's states into the engine, and return its progress.

    Every rank reads what it owns, and together the ranks check all files. A `tokenizer` of None fits any.
    Raises DamagedFile, and ValueError if model, tokenizer or the optimizer's states differ. After either
    error the engine's states are undefined until another checkpoint is loaded. Nothing is sent, so ranks may
    fail independently.
    """
    on_gpu = engine.device.type == "cuda"
    on_device = torch.cuda.device(engine.device) if on_gpu else nullcontext()  # a thread begins with device 0
    with on_device, CheckpointReader(path, on_progress) as reader:
        if tokenizer is not None:
            check_tokenizer(path, reader.state["tokenizer"], tokenizer)
        model = engine.model.config if isinstance(engine.model, GPT) else None
        saved_model = reader.state["config"].get("model")
        present = describe_units(engine)
        check_units(path, reader.units, present, saved_model, model)
        _load_buffers(reader, engine)
        _load(WEIGHTS, [WEIGHTS], reader, engine)
        if with_optimizer:
            if not reader.state["with_optimizer"] and reader.state["optimizer_steps"]:
                raise ValueError(f"{path}: saved with --no-save-optim; add --no-load-optim")
            saved = reader.state.get("kinds", (WEIGHTS, *MOMENTS) if reader.state["with_optimizer"] else ())
            if MOMENTUM in saved and MOMENTUM not in engine.states.kinds:
                fix = "add --optimizer muon, or --no-load-optim"
                raise ValueError(f"{path}: has no moments of the matrices that Muon trained; {fix}")
            if problem := engine.states.left_by_muon(reader.state.get("matrices", ())):
                raise ValueError(f"{path}: {problem}")
            for kind in engine.states.kinds[1:]:
                sources = sources_of(kind, engine.states.kinds, saved)
                # Zero if no step was taken (imported weights), or if AdamW took them and had no momentum.
                if not sources and reader.state["with_optimizer"] and not may_lack(kind):
                    there = ", ".join(saved[1:])
                    raise ValueError(
                        f"{path}: has no {kind}, which this optimizer needs; it was saved with {there}"
                    )
                if sources or kind != REFERENCE:  # which otherwise starts as the weights
                    _load(kind, sources, reader, engine)
            engine.states.load_row_moments(reader.read_row_moments)
            formats = reader.state.get("difference_formats") if REFERENCE in saved else None
            engine.states.load_difference_formats(formats_of_units(formats, reader.units, present))
            if engine.scaling is not None:
                engine.scaling.load_state(reader.state.get("product_scaling"))
            engine.states.load_optimizer_steps(reader.state["optimizer_steps"])
            engine.loss_scale.load_state(reader.state["loss_scale"])
            engine.load_last_norm(reader.state.get("last_norm"))
        reader.check_rest(engine.topology.rank, engine.topology.world_size)
        progress = Progress.from_json(reader.state["progress"])
        engine.iteration = progress.iteration
        return progress


def saved_settings(path: Location) -> tuple[dict[str, Any], int, list[str]]:
    """Settings by part and field, data ranks and saved kinds of states, of a checkpoint that was loaded."""
    state = saved_state(path)
    return state["config"], saved_mesh(state).data_ranks, state.get("kinds", [])


def saved_state(path: Location) -> dict[str, Any]:
    """The content of state.json of a checkpoint, after it was loaded."""
    return json.loads(read_limited(path / STATE, STATE_LIMIT))


def _load_buffers(reader: CheckpointReader, engine: ZeroEngine) -> None:
    saved = reader.state.get("buffers", {})
    present = describe_buffers(engine)
    for name in sorted(saved.keys() | present.keys()):
        was, now = saved.get(name), present.get(name)
        if was != now:
            shown = [
                "none" if each is None else f"{each['dtype']} {tuple(each['shape'])}" for each in (was, now)
            ]
            raise ValueError(f"{reader.path}: buffer {name} is {shown[0]}, this model has {shown[1]}")
    for name, buffer in engine.buffers.persistent().items():
        target = torch.empty(buffer.shape, dtype=buffer.dtype)
        reader.read_buffer(name, target)
        buffer.copy_(target)


def _load(kind: str, sources: Sequence[str], reader: CheckpointReader, engine: ZeroEngine) -> None:
    """Read one kind of states, the sum of saved ones; zero without any."""

    def fill(index: int, elements: range, target: Tensor) -> None:
        if not sources:
            target.zero_()
        layout = engine.units[index].layout
        for number, source in enumerate(sources):
            part = torch.empty_like(target) if number else target
            reader.read_shard(source, layout, elements, part, engine.mesh)
            if number:
                target.add_(part)

    engine.states.fill(kind, fill)
