"""Models and arguments that the engine refuses, in a line that names what is wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.zero.own_modules import (
    Stack,
    TiesUnits,
    WithBuffers,
    batch_of,
    engine_of,
    initialize,
    stack_of,
)
from tests.zero.zeropp_engines import QWZ


def units_of(model: Stack, units: list[tuple[str, nn.Module]]) -> None:
    model.units = lambda: units


def tie_outside(model: Stack) -> None:
    model.other = nn.Linear(12, 12, bias=False)
    model.other.weight = model.layers[0].linear.weight


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: setattr(model.layers[1], "tables", {"mask": [torch.ones(3)]}),
            r"layers.1.tables: a tensor on the meta device .* register_buffer",
        ),
        (
            lambda model: setattr(model.head, "spectrum", nn.Parameter(torch.zeros(3, dtype=torch.cfloat))),
            r"head.spectrum: is complex; .*view_as_complex",
        ),
        (
            lambda model: setattr(model.head, "codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), False)),
            r"head.codes: is torch.int8; make it a buffer",
        ),
        (
            lambda model: units_of(model, [("layers", model.layers), ("head", model.head)]),
            r"layers: ModuleList has no forward, .*; list its modules",
        ),
        (lambda model: model.requires_grad_(False), r"the model has no parameter to train"),
        (
            lambda model: setattr(model.layers[1].linear, "weight", model.layers[0].linear.weight),
            r"layers.1.linear.weight: is tied to layers.0.linear.weight; .* parts of one unit, or ",
        ),
        (
            lambda model: units_of(model, model.units()[1:]),
            r"layers.0.linear.weight: belongs to no unit; units\(\) must list a module that has it$",
        ),
        (tie_outside, r"other.weight: belongs to no unit; "),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(change: Callable[[Stack], None], said: str) -> None:
    def changed() -> Stack:
        model = Stack()
        change(model)
        return model

    with pytest.raises(ValueError, match=f"^{said}"):
        engine_of(changed)


@pytest.mark.parametrize("left", ["layers.1.linear.weight", "layers.4.base", "layers.0.shift"])
@pytest.mark.parametrize("part", [False, True])
def test_an_initialize_that_leaves_something_out_is_refused(left: str, part: bool) -> None:
    def forgets(name: str, tensor: Tensor) -> None:
        if name != left:
            initialize(name, tensor)
        elif part and tensor.dim():
            tensor[1:] = 0

    with pytest.raises(ValueError, match=rf"^{left}: initialize\('{left}', tensor\) must fill the whole"):
        engine_of(stack_of(WithBuffers), initialize=forgets)


@pytest.mark.parametrize(
    ("make", "name", "fix"),
    [
        (Stack, "layers.1.linear.wieght", r"did you mean layers.1.linear.weight\?"),
        (Stack, "lm", "there are layers.0.linear.weight, layers.0.linear.bias, layers.1.linear.weight …"),
        (TiesUnits, "last.weight", r"did you mean .*"),  # its name is first.weight
    ],
)
def test_a_decoupled_name_that_no_parameter_has_is_refused(
    make: Callable[[], Stack], name: str, fix: str
) -> None:
    with pytest.raises(ValueError, match=f"^decoupled {name}: no parameter of the model's units; {fix}$"):
        engine_of(make, decoupled=("head.weight", name))


def test_a_second_rate_without_decoupled_parameters_is_refused() -> None:
    engine = engine_of(Stack)
    engine.accumulate(batch_of(0, 0), index=0, micro_batches=1)
    with pytest.raises(ValueError, match=r"^decoupled_rate 0.001: no parameter is decoupled; name some"):
        engine.step(1e-2, 1e-3)


def test_ranks_that_cannot_obey_are_refused_in_python_too() -> None:
    with pytest.raises(ValueError, match=r"^--zero-quantized-weights-format delta4: needs 2 or more nodes"):
        engine_of(Stack, **QWZ, zero_quantized_weights_format="delta4")
