"""Models and settings that an engine would train otherwise than they say: refused by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp import EngineConfig, Mesh, ModelConfig, OptimizerConfig, Topology, ZeroConfig, ZeroEngine
from megatron_zpp.api.checks import check_model
from megatron_zpp.model.build import build_model
from tests.api.models import Stateless, engine_of
from tests.support import refusal
from tests.zero.own_modules import Stack, initialize, stack_of
from tests.zero.own_modules import WithBuffers as Buffered
from tests.zero.ranks import on_ranks

MUON = {"config": EngineConfig(optimizer=OptimizerConfig(optimizer="muon"))}


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


def on_meta(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        with torch.device("meta"):
            return make()

    return made


def with_(change: Callable[[Stack], Any]) -> Callable[[], Stack]:
    def made() -> Stack:
        model = Stack()
        change(model)
        return model

    return made


def listing(units: Callable[[Stack], Any]) -> Callable[[], Stack]:
    return with_(lambda model: setattr(model, "units", lambda: units(model)))


class Other(Tensor):
    """May compute otherwise than a plain tensor."""


def hook(parameter: nn.Parameter, register: str) -> None:
    getattr(parameter, register)(lambda given: None)


def gpt(zero: dict[str, Any], **model: Any) -> tuple[Callable[[], nn.Module], dict[str, Any]]:
    """A model that is built beside the settings of its engine."""
    shape = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=4)
    make = on_meta(partial(build_model, shape, 50, **model))
    return make, {"config": EngineConfig(zero=ZeroConfig(**zero)), "initialize": lambda name, tensor: None}


HOOKED = "head.weight: has a hook, and the engine trains another parameter in its place; let the forward"
ANOTHERS = "layers.0.linear.weight: is another engine's; build a model anew, and load that one's state_dict$"
UNITS = r"units\(\)"
FROZEN = with_(lambda it: it.layers[1].requires_grad_(False))
OFFLOADS = EngineConfig(
    zero=ZeroConfig(zero_stage=1, zero_offload_optimizer=True), optimizer=MUON["config"].optimizer
)
NO_RULE = "must be an object with state_names: an UpdateRule"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (on_meta(Own), r"scale: is on the meta device, and Own has no reset_parameters for it; build"),
        (on_meta(Forgets), r"scale: is on the meta device, and reset_parameters of Forgets leaves it"),
        (on_meta(stack_of(Buffered)), r"layers.0.frequencies: is on the meta device, and WithBuffers has"),
        (with_(lambda it: it.head.double()), r"head.weight: is torch.float64, .*; call model"),
        (
            with_(lambda it: it.head.bfloat16()),
            r"head.weight: is torch.bfloat16, and layers.0.linear.weight is torch.float32",
        ),
        (with_(lambda it: hook(it.head.weight, "register_hook")), HOOKED),
        (with_(lambda it: hook(it.head.weight, "register_post_accumulate_grad_hook")), HOOKED),
        (with_(lambda it: setattr(it, "head", nn.LazyLinear(1))), r"head.weight: has no shape yet; run one"),
        (
            with_(lambda it: setattr(it, "kept", {"all": [it.head.weight]})),
            r"kept: has the parameter head.weight, which the engine replaces where it is registered; ",
        ),
        (
            with_(lambda it: setattr(it.head, "table", nn.Embedding(3, 4, sparse=True))),
            r"head.table.weight: gradients are dense; build it with sparse=False",
        ),
        (
            with_(lambda it: setattr(it.head.weight, "data", it.layers[0].linear.weight.data[:1])),
            r"head.weight: has the memory of layers.0.linear.weight, and would not have it under the ",
        ),
        (
            with_(lambda it: setattr(it.layers[4].linear.bias, "data", it.layers[1].linear.weight.data[3])),
            r"layers.4.linear.bias: has the memory of layers.1.linear.weight, and would not have it",
        ),
        (
            with_(lambda it: setattr(it, "kept", {"row": it.head.weight.detach()[0, 2:]})),
            r"kept: has the memory of head.weight, and would not have it under the engine; to tie ",
        ),
        (
            with_(lambda it: it.register_buffer("first", it.head.weight.data)),
            r"first: has the memory of head.weight, and would not have it under the engine; to tie ",
        ),
        (
            with_(lambda it: setattr(it.head, "weight", nn.Parameter(torch.ones(1, 12).as_subclass(Other)))),
            r"head.weight: is a Other, and the engine trains a plain parameter in its place; let the forward",
        ),
        (
            with_(lambda it: it.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)),
            r"graph: is torch.sparse_coo, and buffers are dense; build it in the forward, of ",
        ),
        (
            with_(lambda it: it.register_buffer("z", torch.zeros(2, dtype=torch.cfloat))),
            r"z: is torch.complex64, and no checkpoint could have it; register it with persistent=False",
        ),
        (with_(lambda it: engine_of(it).close()), ANOTHERS),
        (partial(torch.jit.script, nn.Linear(12, 1)), "the model: is a ScriptModule; list a plain module"),
        (
            lambda: Stack(lambda: torch.jit.trace(nn.Linear(12, 12), torch.ones(1, 12))),
            "layers.0: is a ScriptModule; list a plain module that has it inside",
        ),
        (
            listing(lambda it: [("same", each) for each in it.layers] + [("head", it.head)]),
            rf"same.linear.weight: two parameters have this name; {UNITS} must name modules otherwise",
        ),
        (listing(lambda it: [*it.layers, it.head]), rf"{UNITS}: must list pairs .*, not Layer"),
        (listing(lambda it: {"head": it.head}), rf"{UNITS}: must list pairs .*, not str"),
        (
            listing(lambda it: [("", it), ("other", nn.Linear(3, 3))]),
            rf"other.weight: {UNITS} lists it, and it is no parameter of the model",
        ),
    ],
)
def test_a_model_that_would_be_trained_otherwise_is_refused(make: Callable[[], nn.Module], said: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=f"^{said}"):
        engine_of(model)


@pytest.mark.parametrize(
    ("make", "settings", "said"),
    [
        (
            Stack,
            {"initialize": initialize},
            r"layers.0.linear.weight: is on cpu, and initialize would replace its values; build",
        ),
        (lambda: [Stack()], {}, "model list: must be a torch.nn.Module"),
        (Stack, {"mesh": EngineConfig()}, "mesh EngineConfig: must be a Mesh; name other arguments, as in c"),
        (Stack, {"config": ZeroConfig()}, "config ZeroConfig: must be an EngineConfig, such as Engine"),
        (Stack, {"mesh": Mesh(local_ranks=2)}, "mesh of 2 ranks: there is no process group; call torch.dist"),
        (Stack, {"mesh": Mesh(tensor_ranks=2)}, "mesh of 2 ranks: ranks cannot share a model of one's own"),
        (
            Stack,
            {"inside_nodes": ("layer.1",)},
            "inside_nodes layer.1: no unit of the model; did you mean layers",
        ),
        (Stack, {"inside_nodes": "head"}, 'inside_nodes head: must be a collection of names: {"head"}'),
        (*gpt({"zero_unit": "layer"}, cut_layers=True), "--zero-unit layer: .*cut_layers=False$"),
        (*gpt({"zero_unit": "sublayer"}), "--zero-unit sublayer: .*cut_layers=True$"),
        (Stack, MUON | {"matrices": ["head.weight"]}, "matrices head.weight: must have the rows of the "),
        (
            Stack,
            MUON | {"matrices": {"head.weight": 1}},
            r"matrices .*: must be rows .* of \(1, 12\), such as \(1,\)",
        ),
        (
            Stack,
            MUON | {"matrices": {"head.bias": (1,)}},
            r"matrices .*: has the shape \(1,\), and is no matrix; omit it",
        ),
        (
            with_(lambda it: setattr(it.head, "empty", nn.Linear(0, 3))),
            MUON | {"matrices": {"head.empty.weight": (3,)}},
            r"matrices .*: has the shape \(3, 0\), and is no matrix; omit it",
        ),
        (
            FROZEN,
            MUON | {"decoupled": ["layers.0.linear.weight"]},
            "decoupled layers.0.linear.weight: Muon trains it, at the first .*",
        ),
        (FROZEN, MUON | {"matrices": {"layers.1.linear.weight": (12,)}}, "matrices .*: is frozen; omit it$"),
        (
            FROZEN,
            MUON | {"optimizer": Stateless("momentum_buffer")},
            "optimizer momentum_buffer: is the name of Muon's .*",
        ),
        (FROZEN, {"config": OFFLOADS}, "--optimizer muon: steps on .*"),
        (Stack, {"optimizer": torch.optim.SGD([torch.zeros(1)])}, f"optimizer SGD: {NO_RULE}"),
        (Stack, {"optimizer": Stateless}, f"optimizer Stateless: {NO_RULE}"),
        (
            Stack,
            {"optimizer": Stateless("weights")},
            "optimizer weights: is the name of a state of the engine; give another",
        ),
        (
            Stack,
            {"optimizer": Stateless("residual_of_sums")},
            "optimizer residual_of_sums: is the name of a state of the engine",
        ),
    ],
)
def test_settings_that_would_not_be_obeyed_are_refused(
    make: Callable[[], nn.Module], settings: dict[str, Any], said: str
) -> None:
    model = make()
    with pytest.raises(ValueError, match=f"^{said}"):
        ZeroEngine(model, **{"device": torch.device("cpu"), **settings})


def test_rows_that_each_rank_would_scale_otherwise_are_refused() -> None:
    model = with_(lambda it: setattr(it, "table", nn.Embedding(3, 4, max_norm=1.0)))()
    check = partial(check_model, model, ZeroConfig(), [("", model)], decoupled=(), inside_nodes=())
    check(ranks=1)
    said = refusal(check, ranks=2)
    assert said.startswith("table.weight: rows that max_norm changes on 2 ranks would be other ones on each")


def on_two_ranks(topology: Topology) -> list[str]:
    """Ranks that do not agree on what has values, and a mesh of other ranks."""
    make: Any = partial(nn.Linear, 12, 1)
    model = (on_meta(make) if topology.rank == 1 else make)()
    others = Mesh(local_ranks=4, rank=topology.rank)
    return [refusal(engine_of, model, topology.mesh()), refusal(ZeroEngine, Stack(), others)]


def test_ranks_that_differ_are_refused() -> None:
    for rank, (values, mesh) in enumerate(on_ranks(2, on_two_ranks)):
        assert values == "bias: has values on some ranks and is on the meta device on others"
        here = f"mesh of 4 ranks, rank {rank}: the process group has 2, this is {rank}; give mesh=Mesh("
        assert mesh.startswith(here)
