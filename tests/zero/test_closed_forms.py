"""Memory: what the engine really holds, against closed forms that share no code with the plan."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

import pytest
import torch

from megatron_zpp.config.model import RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.placement import Layout
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.read_guard import Unreadable
from tests.support import nightly
from tests.zero.engines import engine_of, model_of
from tests.zero.ranks import on_ranks

VOCAB = 512
MODEL = model_of(num_layers=4, hidden_size=128, num_attention_heads=4)
BF16 = PrecisionConfig(bf16=True)


def build(topology: Topology, stage: int, prefetch: int = 1, precision: PrecisionConfig = BF16) -> ZeroEngine:
    zero = ZeroConfig(zero_stage=stage, zero_prefetch_units=prefetch if stage == 3 else None)
    return engine_of(
        MODEL,
        VOCAB,
        zero=zero,
        precision=precision,
        topology=topology,
        recompute=RecomputeConfig(recompute_granularity="full", recompute_method="uniform"),
    )


def model_state_bytes(parameters: int, ranks: int, stage: int) -> float:
    """Bytes of model states on each rank, without padding and buffers (ZeRO paper, section 5 and figure 1).

    Parameters as they compute take 2 bytes, accumulated gradients 4, and fp32 weights and two moments 12.
    """
    shares = [ranks if stage >= first else 1 for first in (3, 2, 1)]  # parameters, gradients, optimizer
    return parameters * sum(cost / share for cost, share in zip((2, 4, 12), shares, strict=True))


def live_bytes(engine: ZeroEngine) -> int:
    """Of every storage that the engine reaches, counted once. It takes the traffic of the ledger."""
    engine.take_traffic()  # waits for the communication threads, which change what is visited
    storages = {}

    def visit(thing: object, seen: set[int]) -> None:
        if id(thing) in seen or isinstance(thing, (type, str, int, float, Unreadable)):
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            if thing.grad is not None:
                visit(thing.grad, seen)
        for part in parts(thing):
            visit(part, seen)

    visit(engine, set())
    return sum(storages.values())


def parts(thing: object) -> Iterator[object]:
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, (list, tuple, set, deque)):
        yield from thing
    elif hasattr(thing, "__dict__"):
        yield from vars(thing).values()


def arena_bytes(
    layouts: Sequence[Layout], stage: int, *, prefetch: int, reduce_bytes: int, nodes: int
) -> int:
    """Bytes of the buffers that units share: slots of gathered parameters, and what reductions need.

    Slots for parameters exist beside the states at stage 3 alone; below it the parameters are the slots.
    `reduce_bytes` is the size of a gradient as it is sent; sums of a node are fp32. The gradients of two
    units of a layout can be on their way; at stage 0 only as they are made, since sums over micro-batches are
    where the result goes. Where there are other ranks a unit's are sent from a buffer, and there is room to
    receive: in two hops for what the ranks of the node send, two units' sums and what two hops 2 receive, in
    turn.
    """
    total, shards = 0, layouts[0].shards
    for layout, units in Counter(layouts).items():
        if stage >= 3:
            total += min(prefetch + 1, units) * layout.numel * 2
        total += min(2, units) * layout.numel * (reduce_bytes if stage > 0 else 2)
    if shards > 1:
        total += 2 * max(layout.numel for layout in layouts) * reduce_bytes
    if min(nodes, shards // nodes) > 1:
        total += 4 * nodes * max(layout.shard_numel for layout in layouts) * 4
    return total


def measure_memory(
    topology: Topology, cases: list[tuple[int, int]]
) -> list[tuple[list[int], list[int], float]]:
    """(live bytes after each micro-batch, after each step, theory) for each stage and prefetch."""
    measured = []
    for stage, prefetch in cases:
        engine = build(topology, stage, prefetch)
        inside, between = [], []
        for micro_batches in (1, 3, 1):
            for index in range(micro_batches):
                tokens = torch.zeros(1, 17, dtype=torch.long)
                engine.accumulate(tokens, index=index, micro_batches=micro_batches)
                inside.append(live_bytes(engine))
            engine.step(1e-3)
            between.append(live_bytes(engine))
        parameters = sum(parameter.numel() for parameter in engine.model.parameters())
        arena = arena_bytes(
            [unit.layout for unit in engine.units],
            stage,
            prefetch=prefetch,
            reduce_bytes=2 if stage >= 2 else 4,
            nodes=topology.nodes,
        )
        states = model_state_bytes(parameters, topology.world_size, stage)
        measured.append((inside, between, states + arena))
    return measured


@pytest.mark.parametrize(("nodes", "local"), [nightly(1, 1), nightly(1, 2), (2, 2)])
def test_a_rank_holds_what_theory_says(nodes: int, local: int) -> None:
    """On 2 × 2 ranks stages 0 and 1 reduce fp32 gradients in two hops."""
    cases = [(0, 1), (1, 1), (2, 1), (3, 0), (3, 2)]
    for measured in on_ranks(nodes * local, measure_memory, cases, ranks_per_node=local):
        for case, (inside, between, theory) in zip(cases, measured, strict=True):
            assert max(inside) <= 1.02 * theory, case
            assert len(set(between)) == 1, case
            assert between[0] < min(inside), case  # gradients are gone between steps
