"""Buffers of modules of users: filled, kept, or refused where ranks would hold different ones."""

import re

import torch
from torch import Tensor

from megatron_zpp.distributed.topology import Topology
from tests.support import refusal
from tests.zero.own_modules import (
    Normalised,
    Stack,
    WithBuffers,
    engine_of,
    initialize,
    stack_of,
    steps_of,
)
from tests.zero.ranks import on_ranks


def test_buffers_are_filled_by_name_and_said() -> None:
    said: list[str] = []
    engine = engine_of(stack_of(WithBuffers), say=said.append)
    layer, expected = engine.model.layers[2], torch.empty(12)
    initialize("layers.2.base", expected)
    assert torch.equal(layer.base, expected)
    assert layer.shift == 2
    assert engine.buffers.persistent()["layers.2.base"] is layer.base
    assert "layers.2.frequencies" not in engine.buffers.persistent()
    assert "layers.0.frequencies" in said[0]


def test_buffers_that_are_not_on_meta_keep_their_values() -> None:
    def with_values() -> Stack:
        model = Stack()
        model.register_buffer("scale", torch.full((3,), 4.0, device="cpu"))
        model.register_buffer("same", model.scale)
        return model

    model = engine_of(with_values).model
    assert model.scale.tolist() == [4.0, 4.0, 4.0]
    assert model.same is model.scale


class AssignsTwice(Stack):
    """The memory of a buffer that is replaced may be that of the next one but one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(12))

    def hidden(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.average = torch.ones(12)
        return super().hidden(x)


class AssignsLate(AssignsTwice):
    """Its buffer is no tensor before the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.average = None


def assign_buffers(topology: Topology) -> list[str]:
    engines = engine_of(AssignsTwice, topology), engine_of(AssignsLate, topology)
    return [refusal(steps_of, engine, error=RuntimeError) for engine in engines for _ in range(5)]


def test_a_buffer_that_a_forward_replaces_twice_is_refused() -> None:
    for said in on_ranks(2, assign_buffers):
        assert all(each.startswith("average: a buffer that the forward changes") for each in said), said


def test_a_buffer_that_the_first_forward_makes_is_a_state() -> None:
    engine = engine_of(AssignsLate)
    steps_of(engine, steps=1)
    assert engine.state_dict()["model"]["average"].tolist() == [1.0] * 12


def change_buffers(topology: Topology) -> str:
    engine = engine_of(stack_of(Normalised), topology)
    try:
        steps_of(engine)
    except RuntimeError as error:
        return str(error)
    return f"{engine.model.layers[0].norm.num_batches_tracked - 2} batches"


def test_buffers_that_a_forward_changes_are_refused_on_several_ranks() -> None:
    assert change_buffers(Topology()) == "4 batches"
    for said in on_ranks(2, change_buffers):
        assert re.match(r"layers.0.norm.\w+: a buffer that the forward changes, .* 2 ranks .*BatchNorm", said)
