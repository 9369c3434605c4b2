"""Modules as users write them, and their training by ZeroEngine and by plain torch from equal weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp import (
    EngineConfig,
    OptimizerConfig,
    PrecisionConfig,
    Topology,
    ZeroConfig,
    ZeroEngine,
    load_operations,
)

WIDTH, LAYERS = 12, 5


class Layer(nn.Module):
    """Each unit of a `Stack`; subclasses return something else, or have other state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Any:
        return self.encode(x)


class Stack(nn.Module):
    """Some equal layers, which take turns in two slots at stage 3, and a head."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.hidden(x))[:, 0].float() - y).square().mean()

    def units(self) -> list[tuple[str, nn.Module]]:
        return [*((f"layers.{index}", layer) for index, layer in enumerate(self.layers)), ("head", self.head)]

    def recomputed_units(self) -> list[range]:
        return []


@dataclass
class Returned:
    hidden: Tensor
    beside: Any


class ReturnsNested(Layer):
    def forward(self, x: Tensor) -> Any:
        return None, {"found": [x.mean(), Returned(self.encode(x), beside=(x.detach(), "name"))]}


def unpacked(_: Stack, layer: nn.Module, x: Tensor) -> Tensor:
    mean, found = layer(x)[1]["found"]
    return found.hidden + mean


class Deep(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.other(super().encode(x)))


class TwoHeads(Deep):
    """Of two outputs the second one's gradient arrives long after that of the first."""

    def forward(self, x: Tensor) -> Any:
        return Layer.encode(self, x), torch.tanh(self.other(x))


class Skips(Stack):
    """The second output of each layer goes around the layers behind it."""

    def hidden(self, x: Tensor) -> Tensor:
        others = []
        for layer in self.layers:
            x, other = layer(x)
            others.append(other)
        for other in others:
            x = torch.tanh(x + other)
        return x


class PassesOn(Deep):
    """Returns what the first layer has made beside, as the layers of T5 do with their position bias."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
        x = self.encode(x)
        shift = torch.tanh(self.other(x)) if shift is None else shift
        return x + shift, shift


class GivesShift(Stack):
    def hidden(self, x: Tensor) -> Tensor:
        shift = None
        for layer in self.layers:
            x, shift = layer(x, shift=shift)
        return x


class LowRank(Layer):
    """A frozen matrix and what is added to it (LoRA, 2106.09685)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.zeros(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def encode(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) + (x @ self.down.t()) @ self.up.t())


class WithBuffers(Layer):
    """A table that is computed, an integer, and a buffer that is a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1 / 10 ** (torch.arange(WIDTH) / WIDTH), persistent=False)
        self.register_buffer("shift", torch.ones((), dtype=torch.int64))
        self.register_buffer("base", torch.zeros(WIDTH))

    def encode(self, x: Tensor) -> Tensor:
        return super().encode(torch.roll(x * self.frequencies + self.base, int(self.shift), 1))


class Normalised(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return super().encode(self.norm(x))


class ReadsInHook(Layer):
    """Its hook reads its weight before the forward, as that of nn.utils.weight_norm does."""

    def __init__(self) -> None:
        super().__init__()
        scale = lambda module, inputs: (inputs[0] * (1 + module.linear.weight.mean()),)  # noqa: E731
        self.register_forward_pre_hook(scale)


def compiled(make: Callable[[], nn.Module], *, in_place: bool) -> nn.Module:
    """A module with torch.compile around it, which traces the calls of its hooks too."""
    module = make()
    if in_place:
        module.compile(backend="eager")
        return module
    return torch.compile(module, backend="eager")


class Attends(nn.Module):
    """A layer of torch that returns (output, weights)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x[None], x[None], x[None])


def stack_that(**methods: Callable[..., Tensor]) -> type[Stack]:
    """A kind of stack with other methods."""
    return type("Stack", (Stack,), methods)


TakesFirst = stack_that(run=lambda _, layer, x: layer(x)[0].view(len(x), -1))


class WithoutElements(Stack):
    """A unit whose only parameter is empty, one without parameters, and an empty parameter beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.activation = nn.Linear(WIDTH, 0, bias=False), nn.Tanh()
        self.head.nothing = nn.Parameter(torch.empty(0, 3))

    def hidden(self, x: Tensor) -> Tensor:
        x = self.activation(super().hidden(x))
        return x + self.empty(x).sum()

    def units(self) -> list[tuple[str, nn.Module]]:
        return [("activation", self.activation), *super().units(), ("empty", self.empty)]


class TiesUnits(Stack):
    """Two units with the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.last.weight = self.first.weight

    def hidden(self, x: Tensor) -> Tensor:
        return self.last(super().hidden(self.first(x)))

    def units(self) -> list[tuple[str, nn.Module]]:
        *layers, head = super().units()
        return [("first", self.first), *layers, ("last", self.last), head]


class ReadsTheRest(Stack):
    """What the model itself reads is a unit around its layers: a parameter, and a table that it shares."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.zeros(WIDTH)), nn.LayerNorm(WIDTH)
        self.first, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last.weight = self.first.weight

    def hidden(self, x: Tensor) -> Tensor:
        x = self.norm(super().hidden(self.first(x) * self.scale))
        return self.last(x) + F.linear(x, self.first.weight)

    def units(self) -> list[tuple[str, nn.Module]]:
        return [("", self), *super().units()]


class TiesInside(Deep):
    """Two modules of a unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other.weight = self.linear.weight


class Nested(Stack):
    """A module of a unit is a unit of its own."""

    def units(self) -> list[tuple[str, nn.Module]]:
        return [*super().units(), ("layers.2.other", self.layers[2].other)]


class Noted(Layer):
    """Reads what it has noted on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.scale = 3.0

    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x * self.linear.weight.scale)


class Scripted(Layer):
    """Has a ScriptModule, whose parameters are in no dictionary of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.jit.script(self.linear)


def stack_of(layer: Callable[[], nn.Module], kind: type[Stack] = Stack) -> Callable[[], Stack]:
    return lambda: kind(layer)


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "nested outputs": stack_of(ReturnsNested, stack_that(run=unpacked)),
    "late output": stack_of(TwoHeads, Skips),
    "passed on": stack_of(PassesOn, GivesShift),
    "MultiheadAttention": stack_of(Attends, TakesFirst),
    "LSTM": stack_of(lambda: nn.LSTM(WIDTH, WIDTH), TakesFirst),
    "LoRA": stack_of(LowRank),
    "buffers": stack_of(WithBuffers),
    "no elements": WithoutElements,
    "tied units": TiesUnits,
    "tied inside": stack_of(TiesInside),
    "the rest": ReadsTheRest,
    "nested": stack_of(Deep, Nested),
    "noted": stack_of(Noted),
    "ScriptModule": stack_of(Scripted),
    "hook": stack_of(ReadsInHook),
}


def initialize(name: str, tensor: Tensor) -> None:
    """Values that depend on the name alone; integers become 2."""
    if not tensor.is_floating_point():
        tensor.fill_(2)
        return
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(sum(name.encode())))
    tensor.copy_(drawn / max(tensor.shape[-1] if tensor.dim() else 1, 1) ** 0.5)


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x[:, 0].abs() + x[:, 1]


def engine_of(
    make: Callable[[], nn.Module],
    topology: Topology | None = None,
    *,
    initialize: Callable[[str, Tensor], None] = initialize,
    say: Callable[[str], None] = lambda line: None,
    device: str = "cpu",
    decoupled: tuple[str, ...] = (),
    **zero: Any,
) -> ZeroEngine:
    """In fp32, without weight decay."""
    with torch.device("meta"):
        model = make()
    return ZeroEngine(
        model,
        (topology or Topology()).mesh(),
        EngineConfig(
            zero=ZeroConfig(**({"zero_stage": 3} | zero)),
            optimizer=OptimizerConfig(weight_decay=0.0),
            precision=PrecisionConfig(fp32=True),
        ),
        initialize=initialize,
        device=torch.device(device),
        operations=load_operations(device, require_kernels=False, say=print),
        say=say,
        decoupled=decoupled,
    )


def steps_of(engine: ZeroEngine, steps: int = 2, micro_batches: int = 2, first: int = 0) -> list[float]:
    """The mean loss over ranks of each micro-batch of some steps."""
    losses, rank = [], engine.topology.rank
    for step in range(first, first + steps):
        for index in range(micro_batches):
            batch = batch_of(step, rank * micro_batches + index)
            loss = engine.accumulate(batch, index=index, micro_batches=micro_batches)
            losses.append(engine.mean_over_ranks(loss).item())
        engine.step(1e-2)
    return losses


@cache
def losses_of_torch(
    make: Callable[[], nn.Module], ranks: int, steps: int = 2, micro_batches: int = 2, device: str = "cpu"
) -> list[float]:
    """The same by torch's AdamW on the mean gradient of all ranks.

    On a device of its own: there are kernels, of cuDNN for one, that round otherwise than a CPU's.
    """
    model = make()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        initialize(name, tensor.data)
    model.to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = OptimizerConfig()
    betas = (config.adam_beta1, config.adam_beta2)
    adam = torch.optim.AdamW(trained, lr=1e-2, betas=betas, eps=config.adam_eps, weight_decay=0.0)
    losses = []
    for step in range(steps):
        adam.zero_grad()
        for index in range(micro_batches):
            batches = (batch_of(step, rank * micro_batches + index) for rank in range(ranks))
            found = [model(*(part.to(device) for part in batch)) for batch in batches]
            (sum(found) / (ranks * micro_batches)).backward()
            losses.append(sum(loss.item() for loss in found) / ranks)
        nn.utils.clip_grad_norm_(trained, config.clip_grad)
        adam.step()
    return losses


def check_trained(topology: Topology, cases: list[tuple[str, dict[str, Any]]], device: str = "cpu") -> None:
    """Train each kind of module with its settings, and compare with torch in fp32."""
    for kind, zero in cases:
        expected = torch.tensor(losses_of_torch(TRAINED[kind], topology.world_size, device=device))
        engine = engine_of(TRAINED[kind], topology, device=device, **zero)
        found = torch.tensor(steps_of(engine))
        engine.close()
        # sums of some hundred numbers near 1 in another order, through some layers and steps
        assert torch.allclose(found, expected, rtol=2e-5, atol=1e-6), (kind, zero, found, expected)


def reads_between(stack: Stack, x: Tensor) -> Tensor:
    """Reads a weight while it is gathered. At stage 3 its slot is another unit's when the backward comes."""
    first, *others = stack.layers
    x = F.linear(first(x), first.linear.weight)
    for layer in others:
        x = layer(x)
    return x


class Keeps(Layer):
    """Keeps what it computed of its weights for a loss beside."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear.weight.square()
        return self.encode(x)


class ReturnsAWeight(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.encode(x), self.linear.weight.t()


class ReturnsDetached(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.encode(x), self.linear.weight.detach()


def uses_returned(stack: Stack, x: Tensor) -> Tensor:
    """Reads the weights of all layers behind the last one, without gradients."""
    weights = []
    for layer in stack.layers:
        x, weight = layer(x)
        weights.append(weight)
    for weight in weights:
        x = torch.tanh(F.linear(x, weight))
    return x


def loss_and(more: Callable[[Stack], Tensor]) -> type[Stack]:
    """Adds to the loss what the model computes of its weights, or of what its layers kept."""
    return stack_that(forward=lambda stack, x, y: Stack.forward(stack, x, y) + more(stack))


READS: dict[str, Callable[[], nn.Module]] = {  # a weight of a layer, where it is read
    "behind": stack_that(hidden=lambda it, x: F.linear(Stack.hidden(it, x), it.layers[1].linear.weight)),
    "ahead": stack_that(hidden=lambda it, x: Stack.hidden(it, F.linear(x, it.layers[2].linear.weight))),
    "method": stack_that(run=lambda it, layer, x: layer.encode(x)),
    "penalty": loss_and(lambda it: sum(weight.square().sum() for weight in it.parameters())),
    "between": stack_that(hidden=reads_between),
    "kept": stack_of(Keeps, loss_and(lambda it: sum(layer.kept.mean() for layer in it.layers))),
    "returned": stack_of(ReturnsAWeight, TakesFirst),
    "returned detached": stack_of(ReturnsDetached, stack_that(hidden=uses_returned)),
}


def read_wrongly(
    topology: Topology, settings: list[dict[str, Any]], device: str = "cpu"
) -> list[tuple[str, str, str]]:
    """Each case is right, or raises an error that names a parameter; returns (kind, case, what was said)."""
    said = []
    for kind, make in READS.items():
        expected = torch.tensor(losses_of_torch(make, topology.world_size, steps=1, micro_batches=1))
        for zero in settings:
            engine = engine_of(make, topology, device=device, **zero)
            for evaluates in (True, False):
                outcome = "right"
                try:
                    if evaluates:
                        found = engine.mean_over_ranks(engine.evaluate(batch_of(0, topology.rank)))[None]
                    else:
                        found = torch.tensor(steps_of(engine, steps=1, micro_batches=1))
                    assert torch.allclose(found.cpu(), expected, rtol=2e-5), (kind, zero, found, expected)
                except RuntimeError as error:
                    outcome = str(error)
                said.append((kind, f"{zero} {'evaluation' if evaluates else 'training'}", outcome))
    return said
