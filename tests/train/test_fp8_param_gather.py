"""--fp8-param-gather: weights as 8-bit codes of the master weights, on every grid and after every load."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.checkpoint.read import load_checkpoint
from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.fp8_delayed import DelayedProduct
from megatron_zpp.model.fp8_scaling import DelayedScaling
from megatron_zpp.model.gpt import GPT
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.traffic import total, traffic_of
from megatron_zpp.train.compiling import compile_parts
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.hop import SentBytes
from tests.checkpoint.saving import TOKENIZER, save
from tests.model.test_fp8_delayed import nearest
from tests.model.variants import MODELS, flags_of
from tests.plan.jobs import job_of
from tests.train.test_fp8_scaling import DELAYED, FLAGS, batch, engine_of, losses_of, state_of
from tests.train.in_process import train_here
from tests.zero.ranks import on_ranks

HELD = "--fp8-param-gather"
E4M3 = torch.float8_e4m3fn


def products(engine: ZeroEngine) -> dict[str, DelayedProduct]:
    """By the weights that they multiply."""
    return {
        name.removesuffix("product") + "weight": module
        for name, module in engine.model.named_modules()
        if isinstance(module, DelayedProduct)
    }


def codes_of(engine: ZeroEngine) -> dict[str, Tensor]:
    """What is multiplied, of an engine that keeps weights whole; bytes."""
    found = {}
    for name, product in products(engine).items():
        assert product.codes is not None
        found[name] = product.codes.view(torch.uint8).clone()
    return found


def masters_of(engine: ZeroEngine) -> dict[str, Tensor]:
    """The fp32 weights of an engine that has all of them."""
    return {
        name: view.clone()
        for unit in engine.units
        for name, view in zip(unit.names, unit.views(unit.master), strict=True)
    }


def take_step(engine: ZeroEngine, step: int, *, poison: bool = False) -> tuple[float, float]:
    """Loss and norm; the loss is not finite on rank 0 if `poison`."""
    rank = engine.grid.data.rank
    weight = float("inf") if poison and engine.topology.rank == 0 else 1.0 if poison else None
    loss = engine.accumulate(batch(step, rank), index=0, micro_batches=1, weight=weight)
    return loss.item(), engine.step(1e-2).grad_norm.item()


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_codes_of_master_weights_are_multiplied(model: str) -> None:
    """At the start by the scale of each weight, then by those that the state has; also in evaluations."""
    engine = engine_of(Topology(), HELD, *flags_of(MODELS[model]))
    engine.evaluate(batch(7, 0))
    masters = masters_of(engine)
    assert set(codes_of(engine)) == {name for name in masters if masters[name].dim() == 2 and "layers" in name}
    for name, codes in codes_of(engine).items():
        scale = torch.tensor(448.0) / masters[name].abs().max()
        assert torch.equal(codes, nearest(masters[name] * scale, E4M3)), name
    for step in range(3):
        largest = {name: masters[name].abs().max() for name in codes_of(engine)}
        take_step(engine, step)
        masters, state = masters_of(engine), state_of(engine)
        assert state is not None
        for name, codes in codes_of(engine).items():
            scale = torch.tensor(state[name.removesuffix(".weight")]["scales"][1])
            assert torch.equal(codes, nearest(masters[name] * scale, E4M3)), name
            if step == 0:
                assert scale == torch.tensor(448.0) / largest[name]
    before = codes_of(engine)
    engine.evaluate(batch(7, 0))
    assert all(torch.equal(codes, before[name]) for name, codes in codes_of(engine).items())
    engine.close()


def test_a_misused_parameter_is_nan() -> None:
    """Parameters whose weights are codes have no contents that a product could take by mistake."""
    engine = engine_of(Topology(), HELD)
    for unit in engine.units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            held = name in products(engine)
            assert parameter.isnan().all() == held
            assert parameter.untyped_storage().nbytes() < 16 or not held
    engine.close()


CASES: list[tuple[str, ...]] = [
    *(("--zero-stage", str(stage)) for stage in range(4)),
    ("--zero-stage", "3", "--zero-hpz-partition-size", "auto"),
    ("--zero-stage", "3", "--zero-hpz-partition-size", "1"),
    ("--zero-stage", "3", "--zero-prefetch-units", "0", "--recompute-granularity", "full")
    + ("--recompute-method", "uniform"),
]


def trained(topology: Topology, held: tuple[str, ...]) -> list[list[float]]:
    """Losses and norms of steps of one and of two micro-batches, and of an evaluation, for each case."""
    torch.set_num_threads(1)
    found = []
    for case in CASES:
        engine, numbers = engine_of(topology, *held, *case), []
        rank = engine.grid.data.rank
        for step, count in enumerate((1, 2, 1)):
            for index in range(count):
                loss = engine.accumulate(batch(step + 5 * index, rank), index=index, micro_batches=count)
                numbers.append(engine.mean_over_ranks(loss).item())
            numbers.append(engine.step(1e-2).grad_norm.item())
        numbers.append(engine.evaluate(batch(8, 0)).item())
        found.append(numbers)
        engine.close()
    return found


def test_stages_and_hpz_have_the_same_bits_as_they_have_without() -> None:
    """2 nodes of 2 ranks. Gradients of several micro-batches are summed in another order from stage 2 on."""
    plain, held = (on_ranks(4, trained, more, ranks_per_node=2)[0] for more in ((), (HELD,)))
    print(plain, held)
    for first in range(len(CASES)):
        for second in range(first):
            if plain[first] == plain[second]:
                assert held[first] == held[second], (CASES[first], CASES[second])
    assert held[0][0] == held[-1][0]
    assert held[0] != plain[0]
    assert held[0] == pytest.approx(plain[0], rel=0.02)
