"""Both update rules of AdamW, the kernel's and torch's, on the engine."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.ops import reference
from megatron_zpp.ops.operations import Operations
from megatron_zpp.train.setup.build_engine import DECOUPLED
from megatron_zpp.zero.adamw import KernelAdamW, TorchAdamW
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.optimizer import DeviceOptimizer, OffloadedOptimizer
from tests.zero.engines import engine_of, model_of, offloaded, operations, weights_of
from tests.zero.ranks import on_ranks

VOCAB = 101
MODEL = model_of()
OPTIMIZER = OptimizerConfig(weight_decay=0.1, adam_eps=1e-4)  # a key bias has no gradient but rounding


ORACLE = Operations(reference, compiled=False)
MOMENTS_IN_FP8 = replace(
    OPTIMIZER, use_precision_aware_optimizer=True, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8"
)
RULES: dict[str, dict[str, Any]] = {
    "kernel": {"rule": KernelAdamW(OPTIMIZER, ORACLE)},
    "torch": {"rule": TorchAdamW(OPTIMIZER)},
    "compact": {"optimizer": replace(MOMENTS_IN_FP8, main_params_dtype="bf16+8"), "operations": ORACLE},
}


def trained(precision: PrecisionConfig, rule: str, steps: int) -> ZeroEngine:
    engine = engine_of(MODEL, VOCAB, precision=precision, **{"optimizer": OPTIMIZER} | RULES[rule])
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        engine.accumulate(torch.randint(VOCAB, (3, 17), generator=generator), index=0, micro_batches=1)
        engine.step(1e-2)
    return engine


def test_the_kernels_update_is_torchs_but_for_rounding() -> None:
    """fp32: after 10 steps no weight is further off than the roundings of its updates."""
    ours, torchs = (weights_of(trained(PrecisionConfig(), rule, 10)) for rule in ("kernel", "torch"))
    for name, weight in ours.items():
        # 10 updates of at most 1e-2, each with a handful of fp32 roundings, which the next gradients amplify
        torch.testing.assert_close(weight, torchs[name], rtol=0, atol=10 * 1e-2 * 64 * 2**-23)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_rounds_masters_to_gather_sources_and_a_skipped_one_leaves_all_alone(rule: str) -> None:
    engine = trained(PrecisionConfig(bf16=True), rule, 2)
    for unit in engine.units:
        assert unit.is_split or torch.equal(unit.gather_source, unit.master.bfloat16())
    states = [shard for kind in engine.states.kinds for shard in engine.states.shards(kind)]
    states += [unit.gather_source for unit in engine.units]
    before = [state.clone() for state in states]
    engine.units[1].parameters[0].register_hook(lambda gradient: gradient * float("inf"))
    engine.accumulate(torch.zeros(1, 17, dtype=torch.long), index=0, micro_batches=1)
    assert engine.step(1e-2).skipped
    assert engine.states.optimizer_steps == 2
    assert all(map(torch.equal, states, before))


BF16 = PrecisionConfig(bf16=True)
OFFLOADED = {
    "fp32": (ZeroConfig(), PrecisionConfig(), OPTIMIZER),
    "bf16": (ZeroConfig(zero_stage=3), BF16, OPTIMIZER),
    "qwZ": (ZeroConfig(zero_stage=3, zero_quantized_weights=True), BF16, OPTIMIZER),
    "moments in fp8": (ZeroConfig(), BF16, MOMENTS_IN_FP8),
}


def several_rates(topology: Topology, name: str) -> list[bool]:
    """Whether what units hold and send is equal bit for bit on the device and offloaded, without a GPU."""
    zero, precision, optimizer = OFFLOADED[name]
    found = []
    for kind, where in ((DeviceOptimizer, nullcontext), (OffloadedOptimizer, offloaded)):
        with where():
            engine = engine_of(
                replace(MODEL, use_mup=True, mup_base_hidden_size=9),
                VOCAB,
                zero=zero,
                precision=precision,
                optimizer=replace(optimizer, clip_grad=0.0),
                topology=topology,
                operations=operations(),
                decoupled=DECOUPLED[:1],
            )
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                tokens = torch.randint(VOCAB, (3, 17), generator=generator)
                engine.accumulate(tokens, index=0, micro_batches=1)
                engine.step(1e-2, 3e-3)
        assert isinstance(engine._optimizer, kind)
        states = [shard.clone() for kind in engine.states.kinds for shard in engine.states.shards(kind)]
        found.append([*states, *(unit.gather_source.clone() for unit in engine.units)])
        engine.close()
    return [torch.equal(here, there) for here, there in zip(*found, strict=True)]


@pytest.mark.parametrize("name", OFFLOADED)
def test_an_offloaded_optimizer_has_several_rates_too(name: str) -> None:
    for equal in on_ranks(2, several_rates, name):
        assert all(equal)
