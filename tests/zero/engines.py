"""Engines around a small GPT, the same one in every test, their devices, and layouts that need no model."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.symmetric_memory import may_have_copy_engines
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.attention import AttentionKernel
from megatron_zpp.model.build import build_model, exchanges_of, norm_classes
from megatron_zpp.model.parallel.layers import splits_of
from megatron_zpp.ops.library import load_operations
from megatron_zpp.ops.operations import Operations
from megatron_zpp.placement import ALIGNMENT, Layout, Placement, within
from megatron_zpp.zero import adamw, optimizer
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import owners_of
from megatron_zpp.zero.optimizer import UpdateRule
from megatron_zpp.zero.prefetch import WeightState
from megatron_zpp.zero.tensor_parallel import TensorShare


def model_of(**settings: Any) -> ModelConfig:
    """A small model without dropout, of which nothing divides: not by ranks, blocks or the alignment."""
    small = {"num_layers": 2, "hidden_size": 36, "num_attention_heads": 3, "seq_length": 16}
    return ModelConfig(**small | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | settings)


def engine_of(
    config: ModelConfig,
    vocab_size: int,
    *,
    zero: ZeroConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    precision: PrecisionConfig | None = None,
    recompute: RecomputeConfig | None = None,
    topology: Topology | None = None,
    device: str = "cpu",
    operations: Operations | None = None,
    seed: int = 3,
    kernel: AttentionKernel | None = None,
    fused_backend: Literal["apex", "torch"] = "torch",
    tensor: int = 1,
    overlapped: bool = False,
    context: int = 1,
    comm_type: str = "auto",
    decoupled: Collection[str] = (),
    inside_nodes: Collection[str] = (),
    rule: UpdateRule | None = None,
    matrices: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> ZeroEngine:
    """An engine with the initial weights of `seed`, drawn on the CPU whatever the device.

    `tensor` ranks share each layer; `overlapped`: with products beside their exchanges. `context` ranks share
    each sample.
    """
    torch.set_num_threads(1)  # as each of several ranks has; sums of more threads have other bits
    zero, mesh = zero or ZeroConfig(), (topology or Topology()).mesh(tensor, context)
    splits, group = {}, None
    if tensor > 1:
        group = TensorGroup(mesh.ranks(mesh.tensor), mesh.rank)
    sharing = TensorGroup(mesh.ranks(mesh.context), mesh.rank) if context > 1 else None
    with torch.device("meta"):
        model = build_model(
            config,
            vocab_size,
            recompute,
            kernel,
            cut_layers=zero.cuts_layers,
            norms=norm_classes(fused_backend),
            group=group,
            overlapped=overlapped,
            context=sharing,
            comm_type=comm_type,
        )
    if group is not None:
        splits = splits_of(model.units())

    def initialize(name: str, tensor: torch.Tensor) -> None:
        drawn = torch.empty(tensor.shape)
        model.initialize_parameter(name, drawn, seed)
        tensor.copy_(drawn)

    return ZeroEngine(
        model,
        mesh,
        EngineConfig(
            zero=zero,
            optimizer=optimizer or OptimizerConfig(weight_decay=0.1),
            precision=precision or PrecisionConfig(),
        ),
        initialize=initialize,
        device=torch.device(device),
        operations=operations,
        fused_backend=fused_backend,
        share=TensorShare(group, splits, exchanges_of(model)),
        decoupled=decoupled,
        rate_factors=model.rate_factors(),
        inside_nodes=inside_nodes,
        rule=rule,
        matrices=matrices,
    )


def states_of(engine: ZeroEngine, kind: str) -> dict[str, torch.Tensor]:
    """A copy of the whole weights, or of a moment, by name. Every rank must call it."""
    mesh, states = engine.mesh, {}
    parts, elements = engine.states.shards(kind), engine.states.shard_elements(kind)
    for unit, part, there in zip(engine.units, parts, elements, strict=True):
        owners = owners_of(kind, mesh, unit.layout.axes)
        shard = torch.zeros(unit.layout.numel // len(owners), device=part.device)
        if mesh.rank in owners:
            first = owners.index(mesh.rank) * len(shard)
            shard[within(there, range(first, first + len(shard)))] = part
        shards = [torch.empty_like(shard, device=engine.device) for _ in range(mesh.world_size)]
        if mesh.world_size > 1:
            dist.all_gather(shards, shard.to(engine.device))
        else:
            shards = [shard]
        for rank in {*range(mesh.tensor_ranks), *unit.layout.different_ranks}:
            flat = torch.cat([shards[owner] for owner in owners_of(kind, mesh.at(rank), unit.layout.axes)])
            for placement, part in zip(unit.layout.placements, unit.views(flat), strict=True):
                if placement.name not in states:
                    states[placement.name] = torch.full(placement.shape, torch.nan, device=flat.device)
                for here, there in placement.parts(rank):
                    place = states[placement.name][there]
                    assert place.isnan().all() or torch.equal(place, part[here]), "differs between ranks"
                    place.copy_(part[here])
    return states


def weights_of(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    """A copy of the whole master weights by name."""
    return states_of(engine, "weights")


def all_states(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    """A copy of the whole states of every kind, by kind and name. Every rank must call it."""
    kinds = {kind: states_of(engine, kind) for kind in engine.states.kinds}
    return {f"{kind}/{name}": state for kind, states in kinds.items() for name, state in states.items()}


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same names, and equal tensors by each."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def needed(engine: ZeroEngine, before: Callable[[int], None] = lambda index: None) -> list[tuple[int, bool]]:
    """The units that a second step needs, in order, and whether the gather of each started only then."""
    prefetcher, found = engine.weights.prefetcher, []
    need = prefetcher._need

    def record(index: int) -> None:
        before(index)
        found.append((index, prefetcher.weights_of(index) is WeightState.SHARDED))
        need(index)

    prefetcher._need = record
    for _ in range(2):
        found.clear()
        engine.accumulate(torch.ones(1, 11, dtype=torch.long), index=0, micro_batches=1)
        engine.step(1e-2)
    return found


def train(engine: ZeroEngine, steps: range, micro_batches: int = 2) -> list[float]:
    """Mean loss and gradient norm of each step, then the loss of an evaluation and a sum of logits.

    On samples of 10 of 101 tokens.
    """
    rank, ranks = engine.mesh.data_rank, engine.mesh.data_ranks
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        data = torch.randint(101, (micro_batches, ranks, 2, 11), generator=generator)
        total = torch.zeros(())
        for index in range(micro_batches):
            torch.manual_seed(1000 * step + index * ranks + rank)
            total += engine.accumulate(data[index, rank], index=index, micro_batches=micro_batches)
        norm = engine.step(1e-3).grad_norm
        found += [engine.mean_over_ranks(total).item(), norm.item()]
    return [
        *found,
        engine.evaluate(data[0, 0]).item(),
        engine.next_token_logits(data[0, 0, :1, :-1]).sum().item(),
    ]


@contextmanager
def offloaded() -> Iterator[None]:
    """Engines that are built and stepped in this block have an OffloadedOptimizer, without a GPU."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(adamw, "DeviceOptimizer", optimizer.OffloadedOptimizer))
        stack.enter_context(patch.object(optimizer, "_pinned_like", torch.empty_like))
        for part in ("Stream", "stream", "current_stream"):
            stack.enter_context(patch.object(torch.cuda, part))
        yield


def this_device() -> torch.device:
    """The GPU of this rank where it talks through NCCL (tests/gpu runs these tests too)."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def copy_engines(mesh: Mesh) -> bool:
    """Whether communication streams inside a node can use them; CPUs have none."""
    return may_have_copy_engines(mesh, this_device())


def operations() -> Operations:
    """The kernels, or the oracle where there is no compiler."""
    return load_operations(this_device().type, require_kernels=False, say=print)


def layout_of(mesh: Mesh, *numels: int, coded: int = 0, alignment: int = ALIGNMENT) -> Layout:
    """Parameters of `numels` elements, of which the first ones are held as codes."""
    placements = (
        Placement(name=str(index), shape=(numel,), coded=index < coded) for index, numel in enumerate(numels)
    )
    return Layout(placements=tuple(placements), axes=mesh.shards, alignment=alignment)
