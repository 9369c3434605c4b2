"""The emulator of benchmarks/convergence.py --emulate against real ranks, bit for bit."""

import hashlib

import pytest
import torch

from benchmarks.emulation.emulated_run import AdamWSettings, EmulatedRanks
from benchmarks.emulation.flat_model import FlatModel
from benchmarks.emulation.rungs import RUNGS, Rung
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.attention import DotProduct
from tests.zero.engines import engine_of, weights_of
from tests.zero.quantizing import operations
from tests.zero.ranks import on_ranks

VOCAB, STEPS, SEED = 101, 4, 3
MODEL = ModelConfig(  # nothing divides: not by ranks, not by blocks
    num_layers=3, hidden_size=36, num_attention_heads=3, seq_length=10, hidden_dropout=0, attention_dropout=0
)
ALL_ON = {
    "zero_stage": 3,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_hpz_partition_size": "auto",
}
RATES = (1e-2, 3e-2, 1e-2, 5e-3)
Case = tuple[str, bool, float, int]  # rung, bf16, clipping, nodes
CASES: list[Case] = [
    (name, bf16, clip, nodes)
    for name, clip in (("today", 1.0), ("baseline", 0.0))
    for bf16 in (False, True)
    for nodes in (1, 2, 4)
    # Plain bf16 gradients cross 2 × 2 in one hop, in the order of the ranks: other sums than two hops give.
    if name == "today" or not bf16 or nodes != 2
]


def batches(step: int, ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return list(torch.randint(VOCAB, (ranks, 2, 11), generator=generator))


def digests(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in weights.items()
    }


def with_engine(started: Topology, cases: list[Case]) -> list[dict[str, str]]:
    """Digests of the final weights of each case, on real ranks."""
    torch.set_num_threads(1)
    rank, world = started.rank, started.world_size
    results = []
    for name, bf16, clip, nodes in cases:
        topology = Topology(rank, world, rank % (world // nodes), world // nodes)
        zero = dict(ALL_ON) if name == "today" else {"zero_stage": 3}
        if world == nodes:
            zero.pop(
                "zero_hpz_partition_size", None
            )  # nodes of one rank keep whole weights: no other numbers
        engine = engine_of(
            MODEL,
            VOCAB,
            zero=ZeroConfig(**zero),
            optimizer=OptimizerConfig(weight_decay=0.1, adam_beta2=0.95, clip_grad=clip),
            precision=PrecisionConfig(bf16=bf16),
            topology=topology,
            operations=operations(),
            seed=SEED,
        )
        for step, learning_rate in enumerate(RATES):
            engine.accumulate(batches(step, world)[rank], index=0, micro_batches=1)
            engine.step(learning_rate)
        results.append(digests(weights_of(engine)))
        engine.close()
    return results


def emulated(case: Case, ranks: int) -> dict[str, str]:
    name, bf16, clip, nodes = case
    flat = FlatModel(
        MODEL,
        VOCAB,
        alignment=RUNGS[name].largest_block,
        dtype=torch.bfloat16 if bf16 else torch.float32,
        device=torch.device("cpu"),
        seed=SEED,
        attention=DotProduct(),
    )
    state = emulated_ranks(flat, RUNGS[name], nodes=nodes, ranks_per_node=ranks // nodes, clip_grad=clip)
    for step, learning_rate in enumerate(RATES):
        state.accumulate(batches(step, ranks))
        state.step(learning_rate, iteration=step)
    assert not flat.master[flat.gaps].any()
    return digests(flat.by_name(flat.master))


def emulated_ranks(
    flat: FlatModel, rung: Rung, *, nodes: int = 2, ranks_per_node: int = 2, clip_grad: float = 1.0
) -> EmulatedRanks:
    return EmulatedRanks(
        flat,
        rung,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        operations=operations(),
        adamw=AdamWSettings(clip_grad=clip_grad),
        seed=SEED,
    )


@pytest.fixture
def one_thread() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_final_weights_are_those_of_real_ranks() -> None:
    """All-on ZeRO++ as it is today, and plain stage 3, on 1 × 4, 2 × 2 and 4 × 1, in fp32 and bf16."""
    first, *others = on_ranks(4, with_engine, CASES)
    assert all(other == first for other in others)
    different = [case for case, real in zip(CASES, first, strict=True) if emulated(case, 4) != real]
    assert not different
