"""Units sharded over other ranks than the rest: each rank has some rows of their matrices, as of experts."""

import hashlib
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp import EngineConfig, Mesh, OptimizerConfig, PrecisionConfig, Split, ZeroConfig, ZeroEngine
from megatron_zpp.api.checks import check_splits
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Axis
from megatron_zpp.zero import engine as zero_engine
from megatron_zpp.zero.build import layouts_of
from megatron_zpp.zero.reads import without_inner
from megatron_zpp.zero.tensor_parallel import TensorShare
from tests.checkpoint.saving import save
from tests.support import nightly, refusal
from tests.zero.engines import same_bits, weights_of
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import AUTO, FOUR_BITS, HPZ, QGZ, QWZ

WIDTH, STEPS = 40, 2
OPTIMIZER = OptimizerConfig(weight_decay=0.1, clip_grad=0.5)


class Swap(torch.autograd.Function):
    """Sends part r of (ranks, ...) to rank r of a group, and returns its part for this rank, by ranks."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, parts = group, parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return Swap.forward(ctx, gradients[0], ctx.group), None


class Experts(nn.Module):
    """A linear map of which each rank along an axis has some rows, and computes them for all their tokens."""

    def __init__(self, ranks: int, group: Any) -> None:
        super().__init__()
        self.ranks, self.group = ranks, group
        self.weight = nn.Parameter(torch.empty(WIDTH // ranks, WIDTH))
        self.bias = nn.Parameter(torch.empty(WIDTH // ranks))

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks == 1:
            return F.linear(x, self.weight, self.bias)
        tokens = Swap.apply(x.expand(self.ranks, *x.shape), self.group)  # of all ranks
        return Swap.apply(F.linear(tokens, self.weight, self.bias), self.group).movedim(0, 1).flatten(1)


class Layer(nn.Module):
    def __init__(self, *share: Any) -> None:
        super().__init__()
        self.norm, self.up, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Experts(*share)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers whose experts are units of their own."""

    def __init__(self, *share: Any) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(*share) for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return (self.head(x)[:, 0].float() - y).square().mean()

    def units(self) -> list[tuple[str, nn.Module]]:
        layers = [(name, part) for name, part in self.named_modules() if isinstance(part, Layer | Experts)]
        return [*layers, ("head", self.head)]


def initialize(name: str, tensor: Tensor) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    tensor.copy_(torch.randn(tensor.shape, generator=generator) * WIDTH**-0.5)


def axis_of(mesh: Mesh, name: str | None) -> Axis:
    """The ranks with parts of the experts: those of a node, pairs of these, one of each node, or all."""
    axes = {"inside": mesh.replicas, "between": mesh.node, "all": Axis(1, mesh.world_size), None: Axis(1, 1)}
    return Axis(1, 2) if name == "pairs" else axes[name]


def splits_of(axis: Axis) -> dict[str, Split]:
    names = [f"layers.{layer}.experts.{part}" for layer in range(3) for part in ("weight", "bias")]
    return dict.fromkeys(names, Split(0, (WIDTH,), axis))


def engine_of(topology: Topology, name: str | None, zero: dict[str, Any], **precision: Any) -> ZeroEngine:
    torch.set_num_threads(1)
    mesh = topology.mesh()
    axis, group = axis_of(mesh, name), None
    if axis.size > 1:
        group = dist.new_group(mesh.ranks(axis), use_local_synchronization=True)
    with torch.device("meta"):
        model = Model(axis.size, group)
    config = EngineConfig(
        zero=ZeroConfig(**zero),
        optimizer=OPTIMIZER,
        precision=PrecisionConfig(**(precision or {"fp32": True})),
    )
    quiet: dict[str, Any] = {"device": torch.device("cpu"), "say": lambda line: None}
    return ZeroEngine(model, mesh, config, initialize=initialize, splits=splits_of(axis), **quiet)


def batch_of(step: int, index: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + index))
    return x, x[:, 0].abs() + x[:, 1]


def steps_of(engine: ZeroEngine, steps: range = range(STEPS)) -> list[float]:
    """The mean loss and the norm of the gradient of each step of two micro-batches."""
    found = []
    for step in steps:
        batches = [batch_of(step, 2 * engine.mesh.rank + index) for index in range(2)]
        losses = [
            engine.accumulate(batch, index=index, micro_batches=2) for index, batch in enumerate(batches)
        ]
        loss = engine.mean_over_ranks(torch.stack(losses).mean())
        found += [loss.item(), engine.step(1e-2).grad_norm.item()]
    return found


def of_torch(ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same of one process without an engine, and its weights."""
    model = Model(1, None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            initialize(name, parameter)
    groups = [
        {"params": [each for each in model.parameters() if (each.dim() > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, OPTIMIZER.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, 1e-2, (OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2), OPTIMIZER.adam_eps)
    found = []
    for step in range(STEPS):
        adamw.zero_grad()
        loss = torch.stack([model(*batch_of(step, index)) for index in range(2 * ranks)]).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        adamw.step()
        found += [loss.item(), norm.item()]
    return found, model.state_dict()


def trained(topology: Topology, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    found = []
    for name, zero in cases:
        engine = engine_of(topology, name, zero)
        steps, norm = steps_of(engine), engine.weights_norm().item()
        model = engine.state_dict().get("model", {})
        engine.evaluate(batch_of(9, topology.rank))
        engine.close()
        found.append((steps, norm, {key: value.tolist() for key, value in model.items()}))
    return found


GRIDS = {
    (2, 2): [
        ("inside", {"zero_stage": 3}),
        ("between", {"zero_stage": 1}),
        ("all", {"zero_stage": 3} | AUTO),
        ("inside", {"zero_stage": 0}),
        ("inside", {"zero_stage": 1} | AUTO),
    ],
    (1, 2): [("inside", {"zero_stage": 1})],
    (2, 1): [("between", {"zero_stage": 3} | HPZ)],
    (1, 4): [
        ("pairs", {"zero_stage": 3} | AUTO),
        ("pairs", {"zero_stage": 2, "zero_gradient_partition_size": "2"}),
    ],
}


@pytest.mark.parametrize(("nodes", "local"), GRIDS)
def test_it_trains_as_one_process_does(nodes: int, local: int) -> None:
    expected, weights = of_torch(nodes * local)
    norm = torch.stack([each.norm() for each in weights.values()]).norm().item()
    cases = GRIDS[nodes, local]
    for rank, results in enumerate(on_ranks(nodes * local, trained, cases, ranks_per_node=local)):
        for case, (found, its_norm, model) in zip(cases, results, strict=True):
            assert found == pytest.approx(expected, rel=1e-5), case
            assert its_norm == pytest.approx(norm, rel=1e-5), case
            assert model.keys() == (set() if rank else weights.keys()), case
            for key, values in model.items():
                torch.testing.assert_close(torch.tensor(values), weights[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("inside", FOUR_BITS | AUTO),
        ("between", QWZ | HPZ | QGZ | AUTO),
        nightly("between", FOUR_BITS | AUTO),
        nightly("inside", QWZ | HPZ | QGZ | AUTO),
        nightly("inside", FOUR_BITS | {"zero_stage": 1, "zero_hpz_partition_size": "1"}),
        nightly("all", FOUR_BITS),
    ],
)
def test_it_trains_in_codes_as_whole_units_do(name: str, zero: dict[str, Any]) -> None:
    """All ranks have the same losses, norms, and references of the weights of other nodes."""
    zero = {"zero_stage": 3} | zero
    of_parts, whole = (on_ranks(4, in_codes, each, zero, ranks_per_node=2) for each in (name, None))
    for found, differing in of_parts:
        assert found == of_parts[0][0] == pytest.approx(whole[0][0], rel=0.05)
        assert differing is None


def in_codes(topology: Topology, name: str | None, zero: dict[str, Any]) -> Any:
    engine = engine_of(topology, name, zero, bf16=True)
    found, differs = steps_of(engine), engine.plan.differences is not None
    return found, engine.weights.differing_references() if differs else None


def digests(engine: ZeroEngine) -> dict[str, str]:
    """Digests of the bits of all states, on rank 0."""
    state = engine.state_dict()
    kinds = {"model": state["model"], **state["optimizer"]} if state else {}
    return {
        f"{kind}/{name}": hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for kind, tensors in kinds.items()
        for name, tensor in tensors.items()
    }


def loaded(topology: Topology, name: str | None, zero: dict[str, Any], directory: str) -> Any:
    """The states that are loaded, those that are trained and saved, and whether copies have the same bits."""
    engine, other = (engine_of(topology, name, zero, bf16=True) for _ in range(2))
    engine.load(directory)
    found = digests(engine)
    other.load_state_dict(engine.state_dict())
    same = [digests(other) == found]
    steps_of(engine, range(2))
    engine.save(directory)
    other.load(directory)
    same.append(digests(other) == digests(engine))
    same.append(steps_of(engine, range(2, 4)) == steps_of(other, range(2, 4)))
    engine.save(directory)
    return found, digests(engine), same


@pytest.mark.parametrize(
    ("meshes", "zero"),
    [
        ([((2, 2), "inside"), ((1, 1), None), ((2, 1), "between"), ((1, 2), None)], {"zero_stage": 3}),
        ([((2, 2), "between"), ((2, 2), None), ((2, 2), "inside")], {"zero_stage": 3} | FOUR_BITS | AUTO),
        nightly([((1, 4), "pairs"), ((2, 2), "all"), ((1, 1), None)], {"zero_stage": 1}),
    ],
    ids=["plain", "four bits", "groups"],
)
def test_its_states_load_on_other_ranks_and_by_whole_units(
    meshes: list[tuple[tuple[int, int], str | None]], zero: dict[str, Any], tmp_path: Path
) -> None:
    """A checkpoint and state_dict load bit for bit; a resumed run on the same ranks has the same losses."""
    saved = None
    for (nodes, local), name in meshes:
        results = on_ranks(nodes * local, loaded, name, zero, str(tmp_path), ranks_per_node=local)
        found, trained_on, _ = results[0]
        assert saved in (None, found)
        assert [same for *_, same in results] == [[True] * 3] * len(results)
        saved = trained_on


class Halved(Model):
    """The model with half its loss, so that two tensor ranks each make half of the gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) / 2


def beside_tensor_ranks(topology: Topology, directory: str) -> Any:
    """The norms of an engine whose tensor ranks each have the whole model, and different samples."""
    mesh, config = topology.mesh(2), EngineConfig(optimizer=OPTIMIZER, precision=PrecisionConfig(fp32=True))
    group = dist.new_group(mesh.ranks(mesh.replicas), use_local_synchronization=True)
    with torch.device("meta"):
        model = Halved(mesh.replicas.size, group)
    share = TensorShare(TensorGroup(mesh.ranks(mesh.tensor), mesh.rank), splits_of(mesh.replicas))
    engine = zero_engine.ZeroEngine(
        model, mesh, config, initialize=initialize, device=torch.device("cpu"), share=share
    )
    found = []
    for step in range(STEPS):
        for index in range(2):
            engine.accumulate(batch_of(step, 2 * mesh.rank + index), index=index, micro_batches=2)
        found.append(engine.step(1e-2).grad_norm.item())
    path = save(Path(directory), engine, Progress(iteration=STEPS))
    states = weights_of(engine)
    with CheckpointReader(path) as reader:
        same = same_bits(reader.parameters(), states)
    return found, engine.weights_norm().item(), same


def test_what_tensor_ranks_have_whole_counts_once(tmp_path: Path) -> None:
    expected, weights = of_torch(4)
    norm = torch.stack([each.norm() for each in weights.values()]).norm().item()
    for found, its_norm, same in on_ranks(4, beside_tensor_ranks, str(tmp_path)):
        assert found == pytest.approx(expected[1::2], rel=1e-5)
        assert its_norm == pytest.approx(norm, rel=1e-5)
        assert same


TWO_NODES = Mesh(nodes=2, local_ranks=2)


def laid_out(splits: dict[str, Split], given: bool = True, **more: Any) -> None:
    with torch.device("meta"):
        units = Model(2, None).units()
    check_splits(units, splits, TWO_NODES, given=given)
    layouts_of(without_inner(units), TWO_NODES, splits=splits, **more)


def test_what_would_not_be_obeyed_is_refused() -> None:
    name, rows = "layers.0.experts.weight", TWO_NODES.replicas
    weight, both = {name: Split(0, (WIDTH,), rows)}, splits_of(rows)
    laid_out(both)
    assert "splits layers.0.experts.weight: the model has a part of it" in refusal(
        laid_out, both, given=False
    )
    for unfit in (0, Split(0, WIDTH, rows), Split(0, (WIDTH,), "replicas")):
        assert "must be a megatron_zpp.Split(dim, runs, axis), such as" in refusal(laid_out, {name: unfit})
    assert "splits layer.0: no parameter of the model's units" in refusal(laid_out, {"layer.0": weight[name]})
    said = refusal(laid_out, {name: Split(0, (WIDTH // 2,), rows)})
    assert "has the shape (20, 40) on each of 2 ranks, so runs must be (40,), or multiples of 2" in said
    assert "dim must be one of the 2 of (20, 40)" in refusal(laid_out, {name: Split(2, (WIDTH,), rows)})
    said = refusal(laid_out, {name: Split(0, (WIDTH,), Axis(2, 4))})
    assert "is no axis of 2 × 2 × 1 × 1 ranks; give mesh.replicas, mesh.node or a part of them" in said
    said = "layers.0.experts.bias: is split among other ranks than layers.0.experts.weight; units() must list"
    assert said in refusal(laid_out, weight)
    said = "matrices layers.0.experts.weight: is split among data ranks; omit it, and AdamW trains it"
    assert refusal(laid_out, both, matrices={name: (WIDTH,)}) == said
