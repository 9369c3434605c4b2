"""A module as users write it, with nothing said: its units, its initial values, what Muon trains."""

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp import (
    GPT,
    EngineConfig,
    Mesh,
    OptimizerConfig,
    PrecisionConfig,
    Topology,
    ZeroConfig,
    ZeroEngine,
)
from megatron_zpp.api import defaults
from megatron_zpp.api.defaults import layer_matrices
from megatron_zpp.model.shape import trained_matrices
from tests.api.models import Stateless, Vision, engine_of, steps_of, steps_of_torch
from tests.zero.engines import model_of
from tests.zero.own_modules import Stack, initialize
from tests.zero.ranks import on_ranks


def units_of(model: nn.Module) -> list[str]:
    return [name for name, _ in defaults.units_of(model)]


MUON = OptimizerConfig(optimizer="muon")


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


class Counts(nn.Linear):
    """A state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def test_states_that_no_checkpoint_has_are_said() -> None:
    said: list[str] = []
    model = nn.Sequential(Counts(4, 4), nn.Linear(4, 4))
    ZeroEngine(model, Mesh(), device=torch.device("cpu"), say=said.append)
    assert said == [" states of get_extra_state that no checkpoint has: 0"]


def test_one_line_is_enough() -> None:
    engine = ZeroEngine(nn.Sequential(nn.Linear(12, 12)), config=EngineConfig(zero=ZeroConfig(zero_stage=3)))
    assert (engine.device.type, engine.mesh, engine.iteration) == ("cpu", Mesh(), 0)


def test_a_model_can_be_saved_whole_where_its_weights_stay() -> None:
    """The hooks that modules have where weights are gathered cannot be."""
    for stage in (0, 3):
        model, file = Stack(), io.BytesIO()
        engine = engine_of(model, zero_stage=stage)
        save = partial(torch.save, model, file)  # noqa: TID251 - as users may
        if stage == 3:
            with pytest.raises(AttributeError, match="local object"):
                save()
        else:
            save()
            file.seek(0)
            loaded = torch.load(file, weights_only=False)  # noqa: TID251
            for name, weight in model.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], weight), name
        engine.close()


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


def test_muon_trains_the_linear_maps_of_layers() -> None:
    layers = listed(6).append(nn.Linear(4, 0, bias=False)).append(nn.Conv1d(2, 2, 3))
    model = Holder(embedding=linear(), layers=layers, more=listed(1), head=linear())
    layers[1].weight.requires_grad = False
    nn.utils.parametrizations.weight_norm(layers[2])  # its weight is no parameter
    layers[3].weight = layers[0].weight
    layers[4].weight = model.embedding.weight
    matrices, others = layer_matrices(model, defaults.units_of(model), MUON)
    assert matrices == dict.fromkeys(("layers.0.weight", "layers.5.weight"), (4,))
    original = [f"layers.2.parametrizations.weight.original{part}" for part in (0, 1)]
    assert {*others} == {"embedding.weight", *original, "layers.7.weight", "more.0.weight", "head.weight"}


def shares(model: nn.Module) -> None:
    model.layers[2].linear.weight = model.layers[0].linear.weight
    model.units = None


def names_otherwise(model: nn.Module) -> None:
    units = [(f"layer{at}", layer) for at, layer in enumerate(model.layers)]
    model.units = lambda: [*units, ("head", model.head)]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda model: None, [f"layers.{at}.linear.weight" for at in range(5)]),
        (shares, [f"layers.{at}.linear.weight" for at in (0, 1, 3, 4)]),
        (names_otherwise, [f"layer{at}.linear.weight" for at in range(5)]),
    ],
    ids=["", "a weight of two layers", "names of units"],
)
def test_what_muon_trains_by_default_is_said(change: Callable[[nn.Module], None], names: list[str]) -> None:
    model, said = Stack(), list[str]()
    change(model)
    engine = ZeroEngine(
        model, Mesh(), EngineConfig(optimizer=MUON), device=torch.device("cpu"), say=said.append
    )
    assert names == [each.name for unit in engine.units for each in unit.layout.placements if each.matrices]
    assert said == [f" Muon trains {len(names)} matrices, and AdamW head.weight"]


def test_a_gpt_has_the_matrices_and_rates_of_pretrain_gpt() -> None:
    shape = {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2, "swiglu": True}
    config = model_of(hidden_size=32, use_mup=True, mup_base_hidden_size=16, **shape)
    for optimizer in (MUON, replace(MUON, muon_no_split_qkv=True)):
        engine = ZeroEngine(
            GPT(config, 102).initialize(3),
            Mesh(),
            EngineConfig(optimizer=optimizer),
            device=torch.device("cpu"),
            say=lambda line: None,
        )
        placements = [each for unit in engine.units for each in unit.layout.placements]
        found = {each.name: each.matrices for each in placements if each.matrices}
        assert found == trained_matrices(config, optimizer)
        assert {each.name: each.rate_factor for each in placements if each.matrices} == dict.fromkeys(
            found, 0.5
        )


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
