"""--fp8-param-gather: weights as 8-bit codes of the master weights, on every grid, and resumed."""

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.route import SentBytes
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.traffic import total, traffic_of
from megatron_zpp.zero.engine import ZeroEngine
from tests.checkpoint.saving import TOKENIZER, save
from tests.model.variants import MODELS, flags_of
from tests.plan.jobs import job_of
from tests.support import nightly
from tests.train.coded_weights import (
    HELD,
    Measured,
    check_codes,
    codes_of,
    masters_of,
    products,
    resumed,
    scales_of,
    steps,
    take_step,
)
from tests.train.test_fp8_scaling import DELAYED, FLAGS, batch, engine_of, state_of
from tests.zero.engines import offloaded, same_bits
from tests.zero.ranks import on_ranks

MUP = "--use-mup --mup-base-hidden-size 16".split()


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_codes_of_master_weights_are_multiplied(model: str) -> None:
    """At the start by the scale of each weight, then by those that the state has; also in evaluations."""
    engine = engine_of(Topology(), HELD, *flags_of(MODELS[model]))
    engine.evaluate(batch(7, 0))
    masters = masters_of(engine)
    assert set(codes_of(engine)) == {
        name for name in masters if masters[name].dim() == 2 and "layers" in name
    }
    check_codes(engine)
    for step in range(3):
        take_step(engine, step)
        check_codes(engine, scales_of(engine))
        if step == 0:
            for name, scale in scales_of(engine).items():
                assert torch.tensor(scale) == torch.tensor(448.0) / masters[name].abs().max()
    before = codes_of(engine)
    engine.evaluate(batch(7, 0))
    assert all(torch.equal(codes, before[name]) for name, codes in codes_of(engine).items())
    engine.close()


@pytest.mark.parametrize("more", [["--decoupled-lr", "1e-3", *MUP], ["--zero-stage", "3"]], ids=" ".join)
def test_an_offloaded_optimizer_has_the_same_bits(more: list[str]) -> None:
    found = []
    for where in (nullcontext, offloaded):
        with where():
            engine = engine_of(Topology(), HELD, *more)
            engine.accumulate(batch(9, 0), index=0, micro_batches=1, weight=float("inf"))
            assert engine.step(1e-2).skipped
            losses = [take_step(engine, step) for step in range(3)]
            found.append((losses, codes_of(engine)))
            engine.close()
    (losses, codes), (others, copies) = found
    assert losses == others
    assert all(torch.equal(codes[name], copies[name]) for name in codes)


def test_a_misused_parameter_is_nan() -> None:
    """Parameters whose weights are codes have no contents that a product could take by mistake."""
    engine = engine_of(Topology(), HELD)
    for unit in engine.units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            held = name in products(engine)
            assert parameter.isnan().all() == held
            assert parameter.untyped_storage().nbytes() < 16 or not held
    engine.close()


CASES = [
    *(f"--zero-stage {stage}" for stage in range(4)),
    "--zero-stage 3 --zero-hpz-partition-size auto",
    "--zero-stage 3 --zero-prefetch-units 0 --recompute-granularity full --recompute-method uniform",
    "--zero-stage 3 --zero-hpz-partition-size auto --zero-quantized-gradients",
]


def measure(topology: Topology) -> list[Measured]:
    """Each of CASES, and the first one without the flag."""
    lines = [*(f"{HELD} {case}" for case in CASES), CASES[0]]
    return [_measure(engine_of(topology, *line.split())) for line in lines]


def _measure(engine: ZeroEngine) -> Measured:
    """Steps of one micro-batch, of two, and of one."""
    numbers, sent = [], (0, 0)
    for found in steps(engine):
        numbers += found
        sent = engine.take_traffic()
    numbers.append(engine.evaluate(batch(8, 0)).item())
    slots = storages(unit.full for unit in engine.units)
    kept = storages(unit.kept for unit in engine.units if unit.kept is not None)
    sources = storages(unit.gather_source for unit in engine.units)
    secondary = sum(kept[place] for place in kept.keys() - slots.keys())
    elsewhere = sum(sources[place] for place in sources.keys() - slots.keys() - kept.keys())
    engine.close()
    return Measured(numbers, sent, sum(slots.values()) + elsewhere, secondary)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the tensors' storages, by address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.fixture(scope="module")
def ranks() -> list[list[Measured]]:
    """2 nodes of 2 ranks."""
    return on_ranks(4, measure, ranks_per_node=2)


def test_stages_and_hpz_have_the_same_bits(ranks: list[list[Measured]]) -> None:
    *held, quantized, plain = (each.numbers for each in ranks[0])
    assert all(numbers == held[0] for numbers in held)
    assert held[0] != plain
    assert held[0] == pytest.approx(plain, rel=0.02)
    assert quantized == pytest.approx(plain, rel=0.05)  # of gradients in 4 bits


def check_plan(case: Sequence[str], ranks: Sequence[Any]) -> None:
    """Require that ranks of 2 nodes, as `Measured`, sent and hold what the plan says."""
    config = parse_args([*FLAGS, *DELAYED, *case, HELD])
    job = job_of(config.model, 61, precision=config.precision, nodes=2, local=2, micro_batch_size=2)
    job = dataclasses.replace(job, zero=config.zero, recompute=config.recompute)
    assert SentBytes(*map(sum, zip(*(rank.sent for rank in ranks), strict=True))) == total(traffic_of(job))
    memory = memory_of(job)
    for rank in ranks:
        assert (memory.weights, memory.zeropp) == (rank.weights, rank.secondary)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_the_plan_is_what_ranks_send_and_hold(index: int, ranks: list[list[Measured]]) -> None:
    check_plan(CASES[index].split(), [rank[index] for rank in ranks])


@pytest.mark.parametrize("case", [nightly(CASES[1]), CASES[4]])
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(case: str, tmp_path: Path) -> None:
    for expected, found, _ in on_ranks(2, resumed, str(tmp_path), case.split()):
        assert found == expected


def test_checkpoints_load_with_the_flag_and_without(tmp_path: Path) -> None:
    """From each kind into the other, and into a grid of other ranks: fp32 weights and scales are equal."""
    for name, flags in (("held", (HELD,)), ("plain", ())):
        on_ranks(2, saved, str(tmp_path / name), "--zero-stage", "3", *flags)
        engines = []
        for more in ((), (HELD,)):
            engine = engine_of(Topology(), *more)
            path = tmp_path / name / "iter_0000005"
            load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)
            engines.append(
                (engine, masters_of(engine), state_of(engine), engine.evaluate(batch(4, 0)).item())
            )
        (plain, weights, state, loss), (held, same, too, near) = engines
        assert state == too
        assert same_bits(weights, same)
        assert near == pytest.approx(loss, rel=0.01)
        check_codes(held, scales_of(held))
        plain.close()
        held.close()


def saved(topology: Topology, directory: str, *more: str) -> None:
    engine = engine_of(topology, *more)
    for step in range(2):
        take_step(engine, step)
    save(Path(directory), engine)
    engine.close()


def test_weights_without_scales_are_scaled_by_themselves(tmp_path: Path) -> None:
    """As --finetune and --no-load-optim load them."""
    saved(Topology(), str(tmp_path))
    engine = engine_of(Topology(), HELD)
    load_checkpoint(tmp_path / "iter_0000005", engine, TOKENIZER, with_optimizer=False)
    engine.evaluate(batch(4, 0))
    check_codes(engine)
    engine.close()
