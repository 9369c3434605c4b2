"""Buffers and frozen parameters of modules of users come back from checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.distributed.topology import Topology
from tests.checkpoint.saving import TOKENIZER, save
from tests.zero.engines import states_of
from tests.zero.own_modules import Layer, LowRank, Stack, WithBuffers, engine_of, stack_of, steps_of
from tests.zero.ranks import on_ranks


class Both(LowRank, WithBuffers):
    """Frozen parameters and buffers."""


def unfrozen() -> Stack:
    model = stack_of(Both)()
    model.requires_grad_(True)
    return model


def continued(topology: Topology, directory: str, stage: int) -> tuple[list[float], list[float]]:
    """Losses of a run, and of another one that a checkpoint of it goes into."""
    engine = engine_of(stack_of(Both), topology, zero_stage=stage)
    for layer in engine.model.layers:
        layer.base.add_(0.5)  # between steps, and equally on all ranks
    steps_of(engine)
    path = save(Path(directory), engine)
    other = engine_of(
        stack_of(Both), topology, zero_stage=stage, initialize=lambda name, tensor: tensor.fill_(1)
    )
    load_checkpoint(path, other, TOKENIZER, with_optimizer=True)
    assert other.model.layers[1].shift == 2
    for layer in (*engine.model.layers, *other.model.layers):
        layer.frequencies.fill_(0.5)  # scratch, which no checkpoint has
    return steps_of(engine, first=3), steps_of(other, first=3)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_a_loaded_engine_continues_bit_for_bit(tmp_path: Path, ranks: int, stage: int) -> None:
    for saved, loaded in on_ranks(ranks, continued, str(tmp_path), stage):
        assert saved == loaded


def test_frozen_parameters_are_saved_once_and_without_moments(tmp_path: Path) -> None:
    engine = engine_of(stack_of(LowRank))
    steps_of(engine)
    path = save(tmp_path, engine)
    frozen = [index for index, unit in enumerate(engine.units) if unit.frozen]
    with safe_open(path / "rank_00000.safetensors", framework="pt") as file:
        names = set(file.keys())
    for index in frozen:
        assert f"weights/unit_{index}" in names
        assert f"exp_avg/unit_{index}" not in names


def test_what_was_frozen_can_be_trained_and_the_other_way_round(tmp_path: Path) -> None:
    first = engine_of(stack_of(Both))
    steps_of(first)
    then = engine_of(unfrozen)
    load_checkpoint(save(tmp_path / "frozen", first), then, TOKENIZER, with_optimizer=True)
    moments, before = states_of(then, "exp_avg"), states_of(first, "weights")
    assert all(torch.equal(weight, before[name]) for name, weight in states_of(then, "weights").items())
    assert not moments["layers.0.linear.weight"].any()
    assert moments["layers.0.down"].any()
    steps_of(then)
    again = engine_of(stack_of(Both))
    load_checkpoint(save(tmp_path / "trained", then), again, TOKENIZER, with_optimizer=True)
    for name, weight in states_of(then, "weights").items():
        assert torch.equal(states_of(again, "weights")[name], weight), name


class OtherShape(WithBuffers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("base", torch.zeros(1))


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (OtherShape, r"buffer layers.0.base is F32 \(12,\), this model has F32 \(1,\)"),
        (Layer, r"buffer layers.0.base is F32 \(12,\), this model has none"),
    ],
)
def test_other_buffers_are_refused_by_name(tmp_path: Path, layer: Callable[[], nn.Module], said: str) -> None:
    path = save(tmp_path, engine_of(stack_of(WithBuffers)))
    with pytest.raises(ValueError, match=said):
        load_checkpoint(path, engine_of(stack_of(layer)), TOKENIZER, with_optimizer=True)
