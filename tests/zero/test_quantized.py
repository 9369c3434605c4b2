"""Engines with ZeRO++ over real groups: qwZ, hpZ and qgZ, alone and together, on several nodes × ranks."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.reductions import Hop
from megatron_zpp.exchange.route import When
from megatron_zpp.ops import reference
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.engine import ZeroEngine
from tests.support import nightly
from tests.zero.engines import weights_of
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import ALL, AUTO, BF16, FOUR_BITS, HPZ, MODEL, QGZ, QWZ, batch, build

NO_HPZ = {"zero_hpz_partition_size": "1"}
FP16 = PrecisionConfig(fp16=True, initial_loss_scale=2.0**12)


def weights_seen(topology: Topology, settings: list[dict[str, Any]]) -> list[list[dict[str, bytes]]]:
    """`_weights_seen` of each setting, in digests, after it was compared on this rank."""
    results = []
    for zero in settings:
        coded = zero.get("zero_quantized_weights") and topology.world_size > 1  # one rank sends none
        codes = QuantFormat() if coded else None
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


@pytest.mark.parametrize(
    ("settings", "local"),
    [([QWZ, HPZ, QWZ | HPZ], 2), ([QWZ | {"zero_hpz_partition_size": "2"}], 4)],
    ids=["two nodes", "groups of a node"],
)
def test_every_pass_of_a_step_sees_the_same_bits_on_every_rank(
    settings: list[dict[str, Any]], local: int
) -> None:
    """Forward, recomputation, backward and evaluation, in both micro-batches of a step.

    Whichever part a rank of one group kept, another group would gather the same bits.
    """
    ranks = on_ranks(4, weights_seen, settings, ranks_per_node=local)
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


def with_a_nan(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.index_fill(0, torch.tensor(1, device=gradient.device), torch.nan)


Skips = tuple[list[float], list[bool], bool]


def skipped_on_nan(topology: Topology, settings: list[tuple[dict[str, Any], PrecisionConfig]]) -> list[Skips]:
    """`skipped` of three steps, whether each moved weights, and whether all are finite after them.

    The first micro-batch of the second step has a NaN on the last rank.
    """
    results = []
    for zero, precision in settings:
        engine = build(topology, zero, precision)
        skipped, moved, weights = [], [], weights_of(engine)
        for step in range(3):
            handles = []
            if step == 1 and topology.rank == topology.world_size - 1:
                handles.append(engine.units[2].parameters[0].register_hook(with_a_nan))
            for index in range(2):
                engine.accumulate(batch(topology, 2 * step + index), index=index, micro_batches=2)
                for handle in handles:
                    handle.remove()
            skipped.append(engine.step(1e-2).skipped.item())
            before, weights = weights, weights_of(engine)
            moved.append(any(not torch.equal(before[name], weights[name]) for name in before))
        results.append((skipped, moved, all(tensor.isfinite().all() for tensor in weights.values())))
    return results


def test_a_nan_on_one_rank_skips_the_step_on_all_and_leaves_nothing_behind() -> None:
    """Also where sums of earlier micro-batches stay in accumulators until the step."""
    settings = [({"zero_stage": 0}, BF16), ({}, BF16), (ALL, BF16), (FOUR_BITS, BF16)]
    settings += [({"zero_stage": 1} | QWZ | QGZ, BF16), ({"zero_stage": 2} | QGZ, BF16)]
    settings += [(AUTO, FP16), (FOUR_BITS | AUTO, FP16), ({"zero_gradient_partition_size": "1"}, FP16)]
    for rank in on_ranks(4, skipped_on_nan, settings, ranks_per_node=2):
        assert rank == [([0.0, 1.0, 0.0], [True, False, True], True)] * len(settings)


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


PARTS = [QWZ, HPZ, QGZ, QWZ | HPZ, QWZ | QGZ, HPZ | QGZ]
TOGETHER = [(ALL, BF16), (FOUR_BITS, BF16), (ALL, FP16)]
OTHERS = [(ALL, PrecisionConfig()), (FOUR_BITS | {"zero_stage": 1, **NO_HPZ}, BF16)]
OTHERS += [({"zero_stage": 2} | QWZ | QGZ, BF16), (ALL | {"zero_quantized_gradients_format": "int8"}, BF16)]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(TOGETHER, id="together"),
        nightly([*((zero, BF16) for zero in PARTS), *OTHERS], id="parts"),
    ],
)
def test_every_combination_learns_what_the_plain_run_learns(
    settings: list[tuple[dict[str, Any], PrecisionConfig]],
) -> None:
    """Alone and together, at every stage where it means something, in fp32, bf16 and fp16.

    Every step is within an eighth of all that the plain run learns: what codes may do to one reduction is
    held to their format elsewhere, but its way through eight steps of Adam has no such bound.
    """
    settings = [({}, BF16), *settings]
    curves = on_ranks(4, losses, settings, ranks_per_node=2)
    assert all(curve == curves[0] for curve in curves[1:])  # every rank sees the same
    plain = curves[0][0]
    learned = plain[0] - plain[-1]
    assert learned > 0.2 * plain[0]
    for (zero, precision), curve in zip(settings, curves[0], strict=True):
        assert curve == pytest.approx(plain, abs=learned / 8), (zero, precision)


def first_errors(topology: Topology, zero: dict[str, Any]) -> list[str]:
    """What steps of one and two micro-batches say if hop 1 of the last one fails."""
    model, said = dataclasses.replace(MODEL, num_layers=1), []
    for micro_batches in (1, 2):
        engine = build(topology, zero, BF16, model)
        *earlier, last = (batch(topology, index) for index in range(micro_batches))
        for index, tokens in enumerate(earlier):
            engine.accumulate(tokens, index=index, micro_batches=micro_batches)
        engine.take_traffic()  # what was submitted so far is done
        with pytest.MonkeyPatch.context() as patched:
            for method in ("exchange", "add_up"):
                patched.setattr(Hop, method, failing(getattr(Hop, method)))
            try:
                engine.accumulate(last, index=micro_batches - 1, micro_batches=micro_batches)
                engine.step(1e-2)
                said.append("no error")
            except OSError as error:
                said.append(str(error))
            for comm_stream in engine._communication.comm_streams:
                comm_stream.close()
    return said


def failing(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with an error at the end of hop 1, so that every rank has sent what others wait for."""

    def fails(hop: Hop, *args: Any, **kwargs: Any) -> Any:
        found = method(hop, *args, **kwargs)
        if hop.stage.when is When.MICRO_BATCH:
            raise OSError("hop 1 failed")
        return found

    return fails


@pytest.mark.parametrize(("quantized", "local"), [(False, 2), (True, 2), (False, 4)])
def test_no_step_is_taken_if_hop_1_of_its_last_micro_batch_fails(quantized: bool, local: int) -> None:
    """On CPUs an error is in the result of the work alone, which somebody has to read."""
    zero = {"zero_stage": 2, "zero_gradient_partition_size": "2", "zero_quantized_gradients": quantized}
    assert on_ranks(4, first_errors, zero, ranks_per_node=local) == [["hop 1 failed"] * 2] * 4
