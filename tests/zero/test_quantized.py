"""Engines with ZeRO++ over real groups: qwZ, hpZ and qgZ, alone and together, on several nodes × ranks."""

import dataclasses
import hashlib
import itertools
from typing import Any

import pytest
import torch

from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.ops import reference
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import WEIGHTS
from tests.support import nightly
from tests.zero.engines import weights_of
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import BF16, MODEL, VOCAB, build

QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
HPZ = {"zero_hpz_partition_size": "auto"}
ALL = QWZ | QGZ | HPZ
FOUR_BITS = ALL | {
    "zero_quantized_weights_format": "delta4",
    "zero_quantized_gradients_format": "rotated4",
}
NO_HPZ = {"zero_hpz_partition_size": "1"}


def batch(topology: Topology, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + topology.rank)
    return torch.randint(VOCAB, (2, 11), generator=generator)


def weights_seen(topology: Topology, settings: list[dict[str, Any]]) -> list[list[dict[str, bytes]]]:
    """`_weights_seen` of each setting, in digests, after it was compared on this rank."""
    results = []
    for zero in settings:
        codes = QuantFormat() if zero.get("zero_quantized_weights") else None
        steps = _weights_seen(topology, build(topology, zero))
        assert all(as_expected(seen, codes, topology.world_size) for seen in steps), zero
        results.append([{name: digest(buffer) for name, buffer in seen.items()} for seen in steps])
    return results


def _weights_seen(topology: Topology, engine: ZeroEngine) -> list[dict[str, torch.Tensor]]:
    """For each of two steps, every content of a unit's buffer that computed, and the master weights."""
    seen: dict[str, torch.Tensor] = {}
    need = engine.weights.prefetcher._need

    def record(index: int) -> None:
        need(index)
        phase = f"{index} {engine.weights.prefetcher._phase.name}"
        buffer = engine.units[index].full
        seen[f"{phase} {sum(name.startswith(phase) for name in seen)}"] = buffer.clone().cpu()

    engine.weights.prefetcher._need = record
    steps = []
    for step in range(2):
        seen.clear()
        for index in range(2):
            engine.accumulate(batch(topology, step), index=index, micro_batches=2)
        engine.evaluate(batch(topology, 9))
        masters = weights_of(engine)
        for index, unit in enumerate(engine.units):
            seen[f"{index} master"] = torch.zeros(unit.layout.numel)
            for name, view in zip(unit.names, unit.views(seen[f"{index} master"]), strict=True):
                view.copy_(masters[name])
        engine.step(1e-2)
        steps.append(dict(seen))
    return steps


def as_expected(seen: dict[str, torch.Tensor], codes: QuantFormat | None, shards: int) -> bool:
    """Whether every pass saw one rounding of the master weights: to bf16, or of each shard to codes."""
    passes = [name for name in seen if not name.endswith("master")]
    assert len(passes) == 2 * 6 + 2 * (6 + 4) + 6  # forwards, backwards with recomputed layers, evaluation
    for name in passes:
        master = seen[name.split()[0] + " master"]
        expected = master.bfloat16() if codes is None else decoded(master, codes, shards)
        if not torch.equal(seen[name], expected):
            return False
    return True


def digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).digest()


def test_every_pass_of_a_step_sees_the_same_bits_on_every_rank() -> None:
    """Forward, recomputation, backward and evaluation, in both micro-batches of a step."""
    settings = [QWZ, HPZ, QWZ | HPZ]
    ranks = on_ranks(4, weights_seen, settings, ranks_per_node=2)
    assert all(rank == ranks[0] for rank in ranks[1:])


def test_groups_inside_a_node_keep_the_parts_that_they_gather() -> None:
    """Two groups of two ranks: whichever part a rank kept, another group would gather the same bits."""
    groups = QWZ | {"zero_hpz_partition_size": "2"}
    ranks = on_ranks(4, weights_seen, [groups])
    assert all(rank == ranks[0] for rank in ranks[1:])


def decoded(flat: torch.Tensor, format: QuantFormat, shards: int) -> torch.Tensor:
    """What is left of `flat` when each of its shards is sent."""
    rows = flat.view(shards, -1)
    messages = torch.empty(shards, format.message_bytes(rows.shape[1]), dtype=torch.uint8)
    oracle = Operations(reference, compiled=False)
    oracle.quantize(rows, messages, format)
    result = torch.empty_like(rows, dtype=torch.bfloat16)
    oracle.dequantize(messages, result, format)
    return result.view(-1)


def secondary_after_load(topology: Topology) -> bool:
    """Whether the passes after a load see the loaded weights, not those that the group kept."""
    engine = build(topology, QWZ | HPZ)
    engine.accumulate(batch(topology, 0), index=0, micro_batches=1)
    engine.step(1e-2)
    shards = [2 * shard for shard in engine.states.shards(WEIGHTS)]
    engine.states.load(WEIGHTS, lambda unit, elements: shards[unit][: len(elements)])
    return all(
        as_expected(seen, QuantFormat(), topology.world_size) for seen in _weights_seen(topology, engine)
    )


def test_secondary_shards_are_not_stale_after_a_load() -> None:
    assert on_ranks(4, secondary_after_load, ranks_per_node=2) == [True] * 4


def skipped_on_nan(topology: Topology, settings: list[dict[str, Any]]) -> list[tuple[float, float, bool]]:
    """(skipped of a clean step, of one with a NaN on the last rank, whether weights are finite after)."""
    results = []
    for zero in settings:
        engine = build(topology, zero)
        skipped = []
        for poison in (False, True):
            if poison and topology.rank == topology.world_size - 1:
                parameter = engine.units[2].parameters[0]
                handle = parameter.register_hook(
                    lambda gradient: gradient.index_fill(
                        0, torch.tensor(1, device=gradient.device), torch.nan
                    )
                )
            engine.accumulate(batch(topology, poison), index=0, micro_batches=1)
            skipped.append(engine.step(1e-2).skipped.item())
        if topology.rank == topology.world_size - 1:
            handle.remove()
        engine.accumulate(batch(topology, 5), index=0, micro_batches=1)
        skipped.append(engine.step(1e-2).skipped.item())
        finite = all(torch.isfinite(tensor).all() for tensor in weights_of(engine).values())
        results.append((*skipped, finite))
    return results


def test_a_nan_on_one_rank_skips_the_step_on_all_and_leaves_nothing_behind() -> None:
    settings = [
        ALL,
        FOUR_BITS,
        {"zero_stage": 1} | QWZ | QGZ,
        {"zero_stage": 2} | QGZ,
    ]
    for rank in on_ranks(4, skipped_on_nan, settings, ranks_per_node=2):
        assert rank == [(0.0, 1.0, 0.0, True)] * len(settings)


def losses(topology: Topology, settings: list[tuple[dict[str, Any], PrecisionConfig]]) -> list[list[float]]:
    """The mean loss of every step on the same batch."""
    curves = []
    for zero, precision in settings:
        engine = build(topology, zero, precision)
        curve = []
        for _ in range(8):
            total = torch.zeros((), device=engine.device)
            for index in range(2):
                total += engine.accumulate(batch(topology, index), index=index, micro_batches=2)
            engine.step(1e-2)
            curve.append(engine.mean_over_ranks(total / 2).item())
        curves.append(curve)
    return curves


@pytest.mark.parametrize("counts", [pytest.param((3,), id="together"), nightly((1, 2), id="parts")])
def test_every_combination_learns_what_the_plain_run_learns(counts: tuple[int, ...]) -> None:
    """Alone and together, at every stage where it means something, in fp32, bf16 and fp16.

    Every step is within an eighth of all that the plain run learns: what codes may do to one reduction is
    held to their format elsewhere, but its way through eight steps of Adam has no such bound.
    """
    fp16 = PrecisionConfig(fp16=True, initial_loss_scale=2.0**12)
    techniques = [
        dict(itertools.chain.from_iterable(part.items() for part in parts))
        for count in counts
        for parts in itertools.combinations((QWZ, HPZ, QGZ), count)
    ]
    settings = [({}, BF16)]
    settings += [(zero, BF16) for zero in techniques]
    settings += [(FOUR_BITS, BF16), (FOUR_BITS | {"zero_stage": 1, **NO_HPZ}, BF16)]
    settings += [({"zero_stage": 2} | QWZ | QGZ, BF16), (ALL, PrecisionConfig()), (ALL, fp16)]
    settings += [(ALL | {"zero_quantized_gradients_format": "int8"}, BF16)]
    curves = on_ranks(4, losses, settings, ranks_per_node=2)
    assert all(curve == curves[0] for curve in curves[1:])  # every rank sees the same
    plain = curves[0][0]
    learned = plain[0] - plain[-1]
    assert learned > 0.2 * plain[0]
    for (zero, precision), curve in zip(settings, curves[0], strict=True):
        assert curve == pytest.approx(plain, abs=learned / 8), (zero, precision)


def test_one_rank_that_sends_nothing_quantises_nothing() -> None:
    def losses(zero: dict[str, Any]) -> list[float]:
        engine, found = build(Topology(), zero), []
        for step in range(3):
            found.append(engine.accumulate(batch(Topology(), step), index=0, micro_batches=1).item())
            engine.step(1e-2)
        return found

    rounded = {"zero_quantized_gradients_format": "rotated4"}
    assert losses(QWZ | QGZ) == losses(QWZ | QGZ | rounded) == losses({"zero_stage": 3})


def test_biases_do_not_vanish_beside_the_gains_of_norms() -> None:
    """Each differs by at most half a step of its block's codes, and by the rounding to bf16."""
    on_ranks(2, check_biases)


def check_biases(topology: Topology) -> None:
    engine = build(topology, QWZ)
    generator, drawn = torch.Generator().manual_seed(6), {}
    for index, unit in enumerate(engine.units):
        flat = torch.zeros(unit.layout.numel)
        for name, view in zip(unit.names, unit.views(flat), strict=True):
            spread = 0.003 if name.endswith("bias") else 0.02
            view.copy_(
                spread * torch.randn(view.shape, generator=generator)
                + (view.dim() == 1 and "norm.weight" in name)
            )
        drawn[index] = flat
    engine.states.load(WEIGHTS, lambda unit, elements: drawn[unit][elements.start : elements.stop])
    for index, unit in enumerate(engine.units):
        engine.weights.prefetcher.before_forward(index)
        for name, sent, arrived in zip(
            unit.names, unit.views(drawn[index]), unit.views(unit.full.float()), strict=True
        ):
            peak = sent.abs().max()
            assert (arrived - sent).abs().max() <= peak * (2.0**-7 + 2.0**-8), name
            assert (arrived == 0).float().mean() < 0.1, name
            assert not torch.equal(arrived, sent.bfloat16()), name  # it was quantised


def test_memory_of_a_secondary_shard_is_the_papers() -> None:
    """ZeRO++, section 3.2: 2 M / N bytes in bf16, whatever qwZ sends."""
    for of_settings in on_ranks(4, secondary_bytes, ranks_per_node=2):
        assert all(kept == 2 * elements / 2 for kept, elements in of_settings)


def secondary_bytes(topology: Topology) -> list[tuple[int, int]]:
    """(bytes of all secondary shards, elements of the units that have one), without and with qwZ."""
    totals = []
    for zero in (HPZ, QWZ | HPZ):
        units = [unit for unit in build(topology, zero).units if unit.plan.in_turn]
        assert len(units) == MODEL.num_layers
        bytes_kept = sum(unit.kept.nbytes for unit in units)
        totals.append((bytes_kept, sum(unit.layout.numel for unit in units)))
    return totals


def traffic(topology: Topology, settings: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(bytes inside the node, between nodes) that this rank sends in a steady step."""
    wide = dataclasses.replace(MODEL, num_layers=8, hidden_size=192)
    sent = []
    for zero in settings:
        engine = build(topology, zero, model=wide)
        for step in range(2):
            engine.take_traffic()
            engine.accumulate(batch(topology, step), index=0, micro_batches=1)
            engine.step(1e-3)
        sent.append(engine.take_traffic())
    return sent


def test_bytes_between_nodes_fall_as_the_paper_says() -> None:
    """2 × 2 ranks, bf16: of M a gather of codes leaves M / 2, hpZ nothing in backward, qgZ M / 4 or less."""
    settings = [{}, QWZ, HPZ, QGZ, ALL]
    ranks = on_ranks(4, traffic, settings, ranks_per_node=2)
    plain, weights, secondary, gradients, everything = (
        sum(rank[index][1] for rank in ranks) for index in range(len(settings))
    )
    gathers = 2 * (plain - weights) / (1 - 2 / 256)  # what a gather of bf16 sends, saved to half less scales
    reduction = plain - gathers
    assert plain / everything >= 3.85
    backward = plain - secondary
    assert (
        0.4 * gathers < backward <= 0.5 * gathers
    )  # the last layer and the embedding are not gathered twice
    assert plain - gradients == pytest.approx(reduction * (1 - (0.5 + 2 / 128) / 2 / 2), rel=1e-3)
