"""What the engine refuses of a model and its settings, which only Python can give it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.engine import ZeroEngine
from tests.zero.quantizing import operations

WIDTH = 8


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH, bias=False), nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.head = Head()
        self.listed = ["first", "middle", "head"]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.middle(self.first(x))) - y).square().mean()

    def units(self) -> list[tuple[str, nn.Module]]:
        return [(name, self.get_submodule(name)) for name in self.listed]

    def recomputed_units(self) -> list[range]:
        return []


def initial(name: str, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def engine_of(
    change: Callable[[Model], object] = lambda model: None,
    with_operations: Operations | None = None,
    decoupled: tuple[str, ...] = (),
    **zero: Any,
) -> ZeroEngine:
    with torch.device("meta"):
        model = Model()
        change(model)
    return ZeroEngine(
        model,
        lambda name, tensor: tensor.copy_(initial(name, tensor)),
        zero=ZeroConfig(**zero),
        optimizer=OptimizerConfig(),
        precision=PrecisionConfig(),
        topology=Topology(),
        device=torch.device("cpu"),
        operations=with_operations,
        decoupled=decoupled,
    )


def tie_to_a_part(model: Model) -> None:
    model.head.output.weight = model.first.weight


def tie_inside(model: Model) -> None:
    model.middle.append(nn.Linear(WIDTH, WIDTH))
    model.middle[1].bias = model.middle[0].bias


def forget(model: Model) -> None:
    model.listed.remove("middle")


def tie_outside(model: Model) -> None:
    model.listed = ["first", "middle", "head.norm"]
    model.head.output.weight = model.first.weight


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (tie_to_a_part, "head.output.weight: is tied to first.weight; .* units of their own.*"),
        (tie_inside, r"middle.1.bias: is tied to middle.0.bias; .* units of their own.*"),
        (forget, r"middle.0.weight: belongs to no unit; units\(\) must list a module that has it"),
        (tie_outside, "head.output.weight: belongs to no unit; .*"),
    ],
)
def test_a_parameter_that_would_not_be_trained_as_it_is_is_refused(
    change: Callable[[Model], None], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        engine_of(change)


def share_a_layer(model: Model) -> None:
    model.middle.append(model.middle[0])


def tie_units(model: Model) -> None:
    model.listed = ["first", "middle", "head.norm", "head.output"]
    model.head.output.weight = model.first.weight


@pytest.mark.parametrize("change", [lambda model: None, share_a_layer, tie_units])
def test_modules_with_the_same_parameters_stay_tied(change: Callable[[Model], None]) -> None:
    def built() -> Model:
        model = Model()
        change(model)
        return model

    engine, plain, data = engine_of(change), built(), torch.randn(4, WIDTH)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(initial(name, parameter))
    loss = plain(data, 2 * data)
    loss.backward()
    assert engine.accumulate((data, 2 * data), index=0, micro_batches=1).item() == pytest.approx(loss.item())
    norm = torch.stack([parameter.grad.norm() for parameter in plain.parameters()]).norm()
    assert engine.step(1e-2).grad_norm.item() == pytest.approx(norm.item())


@pytest.mark.parametrize(
    ("change", "name", "fix"),
    [
        (lambda model: None, "head.output.wieght", r"did you mean head.output.weight\?"),
        (lambda model: None, "lm", "there are first.weight, middle.0.weight, middle.0.bias …"),
        (tie_units, "head.output.weight", r"did you mean .*"),  # its name is first.weight
    ],
)
def test_a_decoupled_name_that_no_parameter_has_is_refused(
    change: Callable[[Model], None], name: str, fix: str
) -> None:
    with pytest.raises(ValueError, match=f"^decoupled {name}: no parameter of the model's units; {fix}$"):
        engine_of(change, decoupled=("first.weight", name))


def test_a_second_rate_without_decoupled_parameters_is_refused() -> None:
    data = torch.ones(4, WIDTH)
    for decoupled in ((), ("first.weight",)):
        engine = engine_of(decoupled=decoupled)
        engine.accumulate((data, data), index=0, micro_batches=1)
        if decoupled:
            engine.step(1e-2, 1e-3)
            continue
        with pytest.raises(ValueError, match=r"^decoupled_rate 0.001: no parameter is decoupled; name some"):
            engine.step(1e-2, 1e-3)


@pytest.mark.parametrize("setting", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_codes_need_operations(setting: str) -> None:
    with pytest.raises(ValueError, match=r"^operations None: .* load_operations\("):
        engine_of(zero_stage=3, **{setting: True})


def test_ranks_that_cannot_obey_are_refused_in_python_too() -> None:
    differences = {"zero_quantized_weights": True, "zero_quantized_weights_format": "delta4"}
    with pytest.raises(ValueError, match=r"^--zero-quantized-weights-format delta4: needs 2 or more nodes"):
        engine_of(with_operations=operations(), zero_stage=3, **differences)
