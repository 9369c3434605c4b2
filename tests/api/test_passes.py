"""Micro-batches, losses and parameters that no step could count as meant: refused in one line."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrizations import weight_norm

from megatron_zpp import PrecisionConfig, Topology
from tests.api.models import Vision, engine_of, steps_of
from tests.api.test_states import same
from tests.support import refusal
from tests.zero.own_modules import WIDTH, Layer, Stack, batch_of, stack_of, stack_that
from tests.zero.ranks import on_ranks

BF16 = PrecisionConfig(bf16=True)


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (
            [],
            "step: 0 of 1 micro-batches are there; call accumulate, which runs the backward, for each first",
        ),
        ([(0, 2, None)], "step: 1 of 2 micro-batches are there; .*"),
        (
            [(0, 3, None), (2, 3, None)],
            "index 2 of 3: the step has 1 of 3 micro-batches; each comes once, .*",
        ),
        ([(0, 3, None), (1, 3, None), (1, 3, None)], "index 1 of 3: the step has 2 of 3 .*"),
        ([(0, 4, None), (1, 2, None)], "index 1 of 2: the step has 1 of 4 .*"),
        ([(1, 2, None)], "index 1 of 2: the step has 0 of 1 .*"),
        ([(5, 2, None)], "index 5: must be 0 to micro_batches - 1, which is 1"),
        ([(0, 2, 1.0), (1, 2, None)], "weight None: give one to each micro-batch of a step, or to none"),
        ([(0, 2, None), (1, 2, 0.0)], "weight 0.0: give one to each micro-batch of a step, or to none"),
    ],
)
def test_a_step_has_each_micro_batch_once(calls: list[tuple[int, int, float | None]], said: str) -> None:
    engine = engine_of(Stack())

    def step() -> None:
        for index, micro_batches, weight in calls:
            engine.accumulate(batch_of(0, index), index=index, micro_batches=micro_batches, weight=weight)
        engine.step(1e-2)

    with pytest.raises(ValueError, match=f"^{said}$"):
        step()
    steps_of(engine, steps=1)  # micro-batch 0 begins a step


def test_gradients_that_are_dropped_are_said() -> None:
    """A step of one micro-batch may be abandoned, and looks like one of several whose number is not given."""
    engine, other = (engine_of(Vision()) for _ in range(2))
    other.load_state_dict(engine.state_dict())
    engine.accumulate(batch_of(7, 7))
    with pytest.warns(UserWarning, match="micro-batch 0 drops the gradients since the last step") as said:
        losses = steps_of(engine)
    assert [each.filename.rpartition("/")[2] for each in said] == ["models.py"]  # who called
    assert losses == steps_of(other)


def test_a_pass_after_close_is_refused() -> None:
    """Without hooks gradients would stay in `.grad`, which the user has not written."""
    engine = engine_of(Stack())
    engine.close()
    calls = {"accumulate": batch_of(0, 0), "step": 1e-2, "evaluate": batch_of(0, 0)}
    for call, argument in calls.items():
        said = refusal(getattr(engine, call), argument, error=RuntimeError)
        assert said.startswith(f"{call}: the engine is closed; ")
    assert engine.state_dict()["model"]


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        ({"x": torch.ones(2, WIDTH)}, "dict"),
        ((torch.ones(2, WIDTH), 3), "with int at 1"),
        ([None, torch.ones(2)], "with NoneType at 0"),
        ((), "tuple"),
        ("text", "str"),
        (torch.ones(3), r"of shape \(3,\)"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, shown: str) -> None:
    engine = engine_of(Stack())
    for call in (engine.accumulate, engine.evaluate):
        with pytest.raises(ValueError, match=rf"^batch {shown}: is no batch: give \(B, T \+ 1\) tokens, or"):
            call(batch)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda loss: {"loss": loss}, "loss dict: the forward must return the mean loss"),
        (lambda loss: (loss, None), "loss tuple: "),
        (lambda loss: None, "loss NoneType: "),
        (lambda loss: loss.expand(2), r"loss torch.float32 of shape \(2,\): "),
        (lambda loss: loss.long(), r"loss torch.int64 of shape \(\): "),
        (lambda loss: loss.detach(), "loss without a gradient: the forward must compute it of parameters"),
    ],
)
def test_what_is_no_loss_is_refused(changed: Callable[[Tensor], Any], said: str) -> None:
    make = stack_that(forward=lambda it, x, y: changed(Stack.forward(it, x, y)))
    with pytest.raises(ValueError, match=f"^{said}"):
        engine_of(make()).accumulate(batch_of(0, 0))


def test_another_default_dtype_is_refused() -> None:
    """Master weights and sums would have it."""
    engine, model = engine_of(Stack()), Stack()
    said = "torch.set_default_dtype torch.bfloat16: master weights and sums are fp32; set torch.float32 again"
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert refusal(engine_of, model).startswith(said)
        assert refusal(engine.accumulate, batch_of(0, 0)).startswith(said)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_freezing_a_parameter_under_an_engine_is_refused(stage: int, trained: bool) -> None:
    model = Stack()
    model.layers[1].requires_grad_(not trained)
    engine = engine_of(model, zero_stage=stage)
    steps_of(engine, steps=1)

    def change() -> None:
        model.layers[1].requires_grad_(trained)
        steps_of(engine, steps=1)

    said = refusal(change, error=RuntimeError)
    assert said.startswith("layers.1.linear.weight: requires_grad cannot change once the engine is built; ")


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1e-3, "1e-3"])
def test_a_learning_rate_that_is_no_rate_is_refused(rate: Any) -> None:
    engine = engine_of(Stack())
    engine.accumulate(batch_of(0, 0))
    said = refusal(engine.step, rate)
    assert said == f"learning_rate {rate}: must be a number of at least 0"
    engine.step(0.0)


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_gradient_that_is_written_is_refused(accumulated: bool) -> None:
    """The backward would add to it, and the step divide both; or no step would take it."""
    engine = engine_of(Stack(), zero_stage=0)
    if accumulated:
        engine.accumulate(batch_of(0, 0))
    engine.model.head.weight.grad = torch.ones(1, WIDTH)
    call = partial(engine.step, 1e-2) if accumulated else partial(engine.accumulate, batch_of(0, 0))
    assert refusal(call, error=RuntimeError).startswith("head.weight: has a .grad, and no step takes one as ")


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(x.to(self.head.weight.dtype))[:, 0].float() - y).square().mean()


class Clamps(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return super().forward(x.to(self.linear.weight.dtype))


def clamp_twice(topology: Topology) -> list[str]:
    """In the forward, at all stages at which the memory that it changes is a copy of the master weights."""
    said = []
    for stage in (1, 2, 3):
        engine = engine_of(stack_of(Clamps)(), topology.mesh(), zero_stage=stage)
        said.append(refusal(steps_of, engine, error=RuntimeError))
        engine.close()
    return said


def test_weights_that_are_changed_in_place_are_refused_where_the_change_would_be_lost() -> None:
    said = [
        refusal(steps_of, engine_of(stack_of(Clamps)(), zero_stage=0, precision=BF16), error=RuntimeError)
    ]
    for each in on_ranks(2, clamp_twice):
        said += each
    assert len(said) == 7
    assert all(each.startswith("layers.0.linear.weight: is changed in place, and its ") for each in said)
    steps_of(engine_of(stack_of(Clamps)(), zero_stage=0))  # the master weights themselves


def halve(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() / 2, model.parameters())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda it: it.bfloat16(),
            "head.weight: the model has another tensor in its place since the engine was",
        ),
        (
            halve,
            "head.weight: the model has another tensor in its place since the engine was built, or other m",
        ),
        (
            lambda it: it.load_state_dict(Casts().state_dict(), assign=True),
            "head.weight: the model has another ",
        ),
        (lambda it: weight_norm(it.head), "head.weight: the model has another tensor in its place since"),
        (
            lambda it: setattr(it.head, "bias", None),
            "head.bias: the model has another tensor in its place since",
        ),
        (
            lambda it: setattr(it, "lora", nn.Linear(1, 1)),
            "lora.bias: is new in the model since the engine was built, which",
        ),
        (
            lambda it: setattr(it, "head", nn.Linear(WIDTH, 1)),
            "head.bias: is new in the model since the engine was built, which",
        ),
        (
            lambda it: setattr(it, "head", nn.Linear(WIDTH, 1, bias=False)),
            "head.bias: is no longer in the model since the engine was built, which",
        ),
    ],
)
def test_parameters_that_are_replaced_or_added_under_an_engine_are_refused(
    change: Callable[[nn.Module], Any], said: str
) -> None:
    engine = engine_of(Casts(), zero_stage=0)
    steps_of(engine, steps=1)
    change(engine.model)
    before = engine.state_dict()
    assert refusal(steps_of, engine, error=RuntimeError).startswith(said)
    assert same(engine.state_dict(), before)


class Keeps(Casts):
    """Reads a parameter that it had before the engine did, in an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.read = partial(torch.add, self.shift)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.read(x), y)


class LooksUp(Casts):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + F.embedding(x.argmax(1), self.table, sparse=True), y)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            Keeps,
            "shift: is read from outside of its module, by code that has kept it since before the engine",
        ),
        (
            LooksUp,
            "table: its gradient is sparse, and gradients are summed as dense ones; look rows up",
        ),
    ],
)
def test_gradients_that_no_step_could_take_are_refused(make: Callable[[], nn.Module], said: str) -> None:
    assert refusal(steps_of, engine_of(make()), error=RuntimeError).startswith(said)


@pytest.mark.parametrize("precision", [BF16, None])
def test_the_models_own_load_state_dict_is_refused_where_it_would_be_lost(
    precision: PrecisionConfig | None,
) -> None:
    engine, other = (engine_of(Casts(), zero_stage=0, precision=precision) for _ in range(2))
    weights = Casts().state_dict()
    engine.model.load_state_dict(weights)
    other.load_state_dict({"model": weights}, optimizer=False)
    if precision is None:
        assert steps_of(engine) == steps_of(other)
    else:
        assert refusal(steps_of, engine, error=RuntimeError).startswith("head.weight: is changed in place")
