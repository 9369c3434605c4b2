"""A module as users write it, with nothing said: its units, its initial values, and refusals by name."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp import (
    EngineConfig,
    Mesh,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ShardSegment,
    Topology,
    ZeroConfig,
    ZeroEngine,
)
from megatron_zpp.api import defaults
from megatron_zpp.api.checks import check_model
from megatron_zpp.api.defaults import layer_matrices
from megatron_zpp.model.build import build_model
from tests.api.models import Vision, engine_of, steps_of, steps_of_torch
from tests.support import refusal
from tests.zero.own_modules import Stack, initialize, stack_of
from tests.zero.own_modules import WithBuffers as Buffered
from tests.zero.ranks import on_ranks


def units_of(model: nn.Module) -> list[str]:
    return [name for name, _ in defaults.units_of(model)]


class Holder(nn.Module):
    """Some modules, by name."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


def linear(**settings: Any) -> nn.Linear:
    return nn.Linear(4, 4, **settings)


def listed(count: int) -> nn.ModuleList:
    return nn.ModuleList(linear() for _ in range(count))


def tied() -> nn.Module:
    made = Holder(embedding=linear(bias=False), layers=listed(2), head=linear(bias=False))
    made.head.weight = made.embedding.weight
    return made


def tied_with_bias() -> nn.Module:
    made = Holder(embedding=linear(bias=False), layers=listed(2), norm=linear(), head=linear())
    made.head.weight = made.embedding.weight
    return made


def tied_to_its_own() -> nn.Module:
    made = Holder(embedding=linear(bias=False), layers=listed(2))
    made.table = made.embedding.weight
    made.units = 4  # not a method
    return made


def body() -> nn.Module:
    """As Hugging Face nests it."""
    inner = Holder(wte=linear(), h=listed(2), drop=nn.Dropout(), ln=nn.LayerNorm(4))
    return Holder(transformer=inner, lm_head=linear())


def two_stacks() -> nn.Module:
    return Holder(encoder=Holder(layers=listed(2), norm=linear()), decoder=Holder(layers=listed(2)))


def experts() -> nn.Module:
    layers = nn.ModuleList(Holder(experts=listed(8)) for _ in range(2))
    return Holder(layers=layers)


def in_a_dictionary() -> nn.Module:
    return Holder(parts=nn.ModuleDict({"first": linear(), "layers": listed(3)}))


LAYERS = ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (body, ["transformer.wte", "transformer.h.0", "transformer.h.1", "transformer.ln", "lm_head"]),
        (tied, ["embedding", *LAYERS, "head"]),
        (tied_with_bias, ["", *LAYERS, "norm"]),
        (tied_to_its_own, ["", *LAYERS]),
        (two_stacks, [*(f"encoder.{each}" for each in (*LAYERS, "norm")), *(f"decoder.{n}" for n in LAYERS)]),
        (experts, LAYERS),
        (in_a_dictionary, ["parts.first", *(f"parts.layers.{n}" for n in range(3))]),
        (lambda: Holder(one=nn.Sequential(linear(), linear())), ["one"]),
        (lambda: nn.Linear(3, 3), [""]),
        (Vision, ["", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]),
    ],
)
def test_default_units(make: Callable[[], nn.Module], expected: list[str]) -> None:
    assert units_of(make()) == expected


def test_units_that_a_model_lists_may_have_names_of_their_own() -> None:
    model = Stack()
    names = list(model.state_dict())
    model.units = lambda: [("body", layer) for layer in model.layers[:1]] + [("rest", model)]
    assert units_of(model) == ["body", "rest"]
    state = engine_of(model).state_dict()["model"]
    assert list(state) == ["body.linear.weight", "body.linear.bias", *(f"rest.{name}" for name in names[2:])]


def trains(topology: Topology, recomputes: bool) -> bool:
    """A model with values, which differ between ranks, trains as torch trains that of rank 0."""
    for stage in (1, 3):
        torch.manual_seed(topology.rank)
        model = Vision(recomputes)
        engine = engine_of(model, topology.mesh(), zero_stage=stage)
        torch.manual_seed(0)
        expected = steps_of_torch(Vision(), topology.world_size)
        assert torch.allclose(torch.tensor(steps_of(engine)), torch.tensor(expected), rtol=2e-5, atol=1e-6)
        engine.close()
    return True


@pytest.mark.parametrize(("ranks", "recomputes"), [(1, False), (2, True)])
def test_a_model_with_values_trains_as_it_is(ranks: int, recomputes: bool) -> None:
    assert all(on_ranks(ranks, trains, recomputes))


def drawn(topology: Topology) -> list[float]:
    """Weights that ranks of other seeds have of a model without values."""
    torch.manual_seed(7 + topology.rank)
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    engine = engine_of(model, topology.mesh(), zero_stage=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert model[1].running_var.tolist() == [1.0, 1.0, 1.0]
    return [number for unit in engine.units for number in unit.master.tolist()]


def test_a_model_without_values_gets_those_of_reset_parameters() -> None:
    (alone,) = on_ranks(1, drawn)
    assert alone[:3] != [0.0, 0.0, 0.0]
    for found in on_ranks(2, drawn):
        assert [number for number in found if number] == [number for number in alone if number]


def some_values(topology: Topology) -> str:
    model = nn.Linear(12, 1)
    if topology.rank == 1:
        with torch.device("meta"):
            model = nn.Linear(12, 1)
    return refusal(engine_of, model, topology.mesh())


def test_ranks_must_agree_on_what_has_values() -> None:
    said = "bias: has values on some ranks and is on the meta device on others"
    assert on_ranks(2, some_values) == [said, said]


class Own(nn.Module):
    """A parameter of its own, and no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * self.scale).sum()


class Forgets(Own):
    def reset_parameters(self) -> None:
        return


class FloatAndDouble(Stack):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.head.to(dtype)


@pytest.mark.parametrize(
    ("make", "meta", "said"),
    [
        (Own, True, r"scale: is on the meta device, and Own has no reset_parameters for it; build"),
        (Forgets, True, r"scale: is on the meta device, and reset_parameters of Forgets leaves it"),
        (stack_of(Buffered), True, r"layers.0.frequencies: is on the meta device, and WithBuffers has"),
        (lambda: FloatAndDouble(torch.float64), False, r"head.weight: is torch.float64, .*; call model"),
        (
            lambda: FloatAndDouble(torch.bfloat16),
            False,
            r"head.weight: is torch.bfloat16, and layers.0.linear.weight is torch.float32",
        ),
    ],
)
def test_what_has_no_value_or_another_format_is_refused_by_name(
    make: Callable[[], nn.Module], meta: bool, said: str
) -> None:
    with torch.device("meta" if meta else "cpu"):
        model = make()
    with pytest.raises(ValueError, match=f"^{said}"):
        engine_of(model)


def with_(change: Callable[[Stack], Any]) -> Stack:
    model = Stack()
    change(model)
    return model


def listing(units: Callable[[Stack], Any]) -> Stack:
    return with_(lambda model: setattr(model, "units", lambda: units(model)))


def hooked(model: Stack) -> None:
    """Trains no first row."""
    model.head.weight.register_hook(lambda gradient: gradient * 0)


def stepping(model: Stack) -> None:
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: with_(hooked), r"head.weight: has a hook, and the engine trains another parameter in its"),
        (lambda: with_(stepping), r"head.weight: has a hook, and the engine trains another parameter in its"),
        (lambda: with_(lambda it: setattr(it, "head", nn.LazyLinear(1))), r"head.weight: has no shape yet; "),
        (
            lambda: with_(lambda it: setattr(it, "kept", {"all": [it.head.weight]})),
            r"kept: has the parameter head.weight, which the engine replaces where it is registered; ",
        ),
        (
            lambda: with_(lambda it: setattr(it.head, "table", nn.Embedding(3, 4, sparse=True))),
            r"head.table.weight: gradients are dense; build it with sparse=False",
        ),
        (
            lambda: with_(lambda it: it.register_buffer("z", torch.zeros(2, dtype=torch.cfloat))),
            r"z: is torch.complex64, and no checkpoint could have it; register it with persistent=False",
        ),
        (
            lambda: listing(lambda it: [("same", each) for each in it.layers] + [("head", it.head)]),
            r"same.linear.weight: two parameters have this name; units\(\) must name modules otherwise",
        ),
        (lambda: listing(lambda it: [*it.layers, it.head]), r"units\(\): must list pairs .*, not Layer"),
        (lambda: listing(lambda it: {"head": it.head}), r"units\(\): must list pairs .*, not str"),
        (
            lambda: listing(lambda it: [("", it), ("other", nn.Linear(3, 3))]),
            r"other.weight: units\(\) lists it, and it is no parameter of the model",
        ),
    ],
)
def test_what_an_engine_would_train_otherwise_is_refused_by_name(
    make: Callable[[], nn.Module], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        engine_of(make())


class Counts(nn.Linear):
    """A state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def test_states_that_no_checkpoint_has_are_said() -> None:
    said: list[str] = []
    model = nn.Sequential(Counts(4, 4), nn.Linear(4, 4))
    ZeroEngine(model, Mesh(), device=torch.device("cpu"), say=said.append)
    assert said == [" states of get_extra_state that no checkpoint has: 0"]


def test_a_model_of_another_engine_is_refused() -> None:
    model = Stack()
    engine_of(model).close()
    said = (
        r"^layers.0.linear.weight: is another engine's; build a model anew, and load that one's state_dict$"
    )
    with pytest.raises(ValueError, match=said):
        engine_of(model)


def test_rows_that_each_rank_would_scale_otherwise_are_refused() -> None:
    model = with_(lambda it: setattr(it, "table", nn.Embedding(3, 4, max_norm=1.0)))
    units = [("", model)]
    more: dict[str, Any] = {"decoupled": (), "inside_nodes": ()}
    check_model(model, ZeroConfig(), units, ranks=1, **more)
    with pytest.raises(ValueError, match=r"^table.weight: rows that max_norm changes on 2 ranks would be "):
        check_model(model, ZeroConfig(), units, ranks=2, **more)


def test_values_that_initialize_would_replace_are_refused_by_name() -> None:
    said = r"^layers.0.linear.weight: is on cpu, and initialize would replace its values; build"
    with pytest.raises(ValueError, match=said):
        ZeroEngine(Stack(), initialize=initialize)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(local_ranks=2), "mesh of 2 ranks: there is no process group; call torch.dist"),
        (Mesh(tensor_ranks=2), "mesh of 2 ranks: ranks cannot share a model of one's own"),
    ],
)
def test_a_mesh_that_is_not_there_is_refused(mesh: Mesh, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        ZeroEngine(Stack(), mesh)


def other_mesh(topology: Topology) -> str:
    return refusal(ZeroEngine, Stack(), Mesh(local_ranks=4, rank=topology.rank))


def test_a_mesh_of_other_ranks_is_refused() -> None:
    said = on_ranks(2, other_mesh)
    assert said[1].startswith("mesh of 4 ranks, rank 1: the process group has 2, this is 1; give mesh=Mesh(")


def test_a_unit_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^inside_nodes layer.1: no unit of the model; did you mean layers"):
        ZeroEngine(Stack(), inside_nodes=("layer.1",))


def test_one_line_is_enough() -> None:
    engine = ZeroEngine(nn.Sequential(nn.Linear(12, 12)), config=EngineConfig(zero=ZeroConfig(zero_stage=3)))
    assert (engine.device.type, engine.mesh, engine.iteration) == ("cpu", Mesh(), 0)


def test_a_model_can_be_saved_whole_once_its_engine_is_closed() -> None:
    """The engine's hooks cannot."""
    model = Stack()
    save = partial(torch.save, model, io.BytesIO())  # noqa: TID251 - as users may
    engine = ZeroEngine(model)
    with pytest.raises(AttributeError, match="local object"):
        save()
    engine.close()
    save()


def test_the_old_call_works_and_warns() -> None:
    with torch.device("meta"):
        models = [Stack() for _ in range(2)]
    with pytest.warns(DeprecationWarning, match=r"call ZeroEngine\(model, mesh, EngineConfig"):
        old = ZeroEngine(  # type: ignore[call-arg]
            models[0],
            initialize,  # type: ignore[arg-type]
            zero=ZeroConfig(zero_stage=3),
            optimizer=engine_of(Stack())._config.optimizer,
            precision=PrecisionConfig(fp32=True),
            topology=Topology(),
            device=torch.device("cpu"),
        )
    new = engine_of(models[1], initialize=initialize)
    assert steps_of(old) == steps_of(new)


SHAPE = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=4)


@pytest.mark.parametrize(
    ("zero", "model", "said"),
    [
        ({"zero_unit": "layer"}, {"cut_layers": True}, "--zero-unit layer: .*cut_layers=False"),
        ({"zero_unit": "sublayer"}, {}, "--zero-unit sublayer: .*cut_layers=True"),
    ],
)
def test_an_engine_refuses_a_model_of_other_units(
    zero: dict[str, Any], model: dict[str, Any], said: str
) -> None:
    """In Python, where the model is built beside the settings."""
    with torch.device("meta"):
        other = build_model(SHAPE, 50, **model)
    with pytest.raises(ValueError, match=f"^{said}$"):
        ZeroEngine(
            other,
            Mesh(),
            EngineConfig(zero=ZeroConfig(**zero)),
            initialize=lambda name, tensor: None,
            device=torch.device("cpu"),
        )


def test_muon_trains_the_linear_maps_of_layers() -> None:
    model = Holder(embedding=linear(), layers=listed(3), more=listed(1), head=linear())
    model.layers[1].weight.requires_grad = False
    nn.utils.parametrizations.weight_norm(model.layers[2])  # its weight is no parameter
    assert layer_matrices(model) == {"layers.0.weight": (4,)}
    config = EngineConfig(optimizer=OptimizerConfig(optimizer="muon"))
    engine = ZeroEngine(Stack(), Mesh(), config, device=torch.device("cpu"))
    matrices = [each.name for unit in engine.units for each in unit.layout.placements if each.matrices]
    assert matrices == list(layer_matrices(engine.model))
    assert matrices


class Stateless:
    """Plain gradient descent, with a state of any name beside."""

    accepts_16bit_gradients = writes_gather_source = False

    def __init__(self, *names: str) -> None:
        self.state_names = names

    def scalars(self, steps: Tensor, rate: float, divisor: Tensor, found_inf: Tensor) -> tuple:
        return rate, divisor

    def step(self, shard: ShardSegment, gradient: Tensor, scalars: tuple) -> None:
        shard.master.sub_(scalars[0] / scalars[1] * gradient)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"decoupled": ["layers.0.weight"]}, "decoupled layers.0.weight: Muon trains it, at the first .*"),
        ({"matrices": {"layers.1.weight": (4,)}}, "matrices .*: is frozen; omit it"),
        ({"optimizer": Stateless("momentum_buffer")}, "optimizer momentum_buffer: is the name of Muon's .*"),
        ({"zero": ZeroConfig(zero_stage=1, zero_offload_optimizer=True)}, "--optimizer muon: steps on .*"),
    ],
)
def test_muon_refuses_what_it_would_not_obey(settings: dict[str, Any], said: str) -> None:
    model = Holder(layers=listed(2))
    model.layers[1].requires_grad_(False)
    config = EngineConfig(
        zero=settings.pop("zero", ZeroConfig()), optimizer=OptimizerConfig(optimizer="muon")
    )
    with pytest.raises(ValueError, match=f"^{said}$"):
        ZeroEngine(model, Mesh(), config, device=torch.device("cpu"), **settings)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            torch.optim.SGD([torch.zeros(1)]),
            "optimizer SGD: must be an object with state_names: an UpdateRule",
        ),
        (Stateless, "optimizer Stateless: must be an object with state_names: an UpdateRule"),
        (Stateless("weights"), "optimizer weights: is the name of a state of the engine; give another"),
        (Stateless("residual_of_sums"), "optimizer residual_of_sums: is the name of a state of the engine"),
    ],
)
def test_a_rule_that_cannot_step_is_refused(rule: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        engine_of(Stack(), optimizer=rule)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"matrices": ["head.weight"]},
            "matrices head.weight: must have the rows of the matrices by a param",
        ),
        ({"matrices": {"head.weight": 1}}, r"matrices .*: must be rows .* of \(1, 12\), such as \(1,\)"),
        ({"matrices": {"head.bias": (1,)}}, r"matrices .*: has the shape \(1,\), and is no matrix; omit it"),
        (
            {"decoupled": "head.weight"},
            'decoupled head.weight: must be a collection of names: {"head.weight"}',
        ),
        ({"inside_nodes": "head"}, 'inside_nodes head: must be a collection of names: {"head"}'),
    ],
)
def test_names_and_rows_of_another_form_are_refused(settings: dict[str, Any], said: str) -> None:
    config = EngineConfig(optimizer=OptimizerConfig(optimizer="muon"))
    with pytest.raises(ValueError, match=f"^{said}"):
        ZeroEngine(Stack(), Mesh(), config, device=torch.device("cpu"), **settings)


@pytest.mark.parametrize("muon", [False, True])
def test_a_rule_without_states(muon: bool) -> None:
    """Beside Muon it trains the rest."""
    model = Vision()
    bias = model.head.bias.detach().clone()
    engine = engine_of(model, optimizer=Stateless(), muon=muon)
    steps_of(engine, steps=1)
    state = engine.state_dict()
    assert list(state["optimizer"]) == (["momentum_buffer", "row_moments"] if muon else [])
    assert not torch.equal(state["model"]["head.bias"], bias)
