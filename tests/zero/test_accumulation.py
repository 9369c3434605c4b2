"""Gradients that accumulate inside nodes (--zero-gradient-partition-size): the same sums, fewer bytes."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.reductions import Hop
from megatron_zpp.exchange.route import When
from megatron_zpp.zero.engine import ZeroEngine
from tests.checkpoint.saving import TOKENIZER, save
from tests.support import nightly
from tests.zero.engines import states_of
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import BF16, FP32, MODEL, VOCAB, build

AUTO = {"zero_gradient_partition_size": "auto"}
HPZ = {"zero_hpz_partition_size": "auto"}
ALL = HPZ | {"zero_quantized_weights": True, "zero_quantized_gradients": True}
FOUR_BITS = ALL | {
    "zero_quantized_weights_format": "delta4",
    "zero_quantized_gradients_format": "rotated4",
}
STEPS = 3


def batches(ranks: int, micro_batches: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randint(VOCAB, (STEPS, micro_batches, ranks, 2, 11), generator=generator)


def train(engine: ZeroEngine, micro_batches: int, *, evaluate: bool = False, repeat: int = 0) -> list[float]:
    """The mean loss of every step, and of an evaluation; of `repeat` steps on the same batch."""
    ranks, rank = engine.topology.world_size, engine.topology.rank
    data, losses = batches(ranks, micro_batches), []
    if repeat:
        data = data[:1].expand(repeat, *data.shape[1:])
    for step in data:
        total = torch.zeros((), device=engine.device)
        for index, tokens in enumerate(step):
            total += engine.accumulate(tokens[rank], index=index, micro_batches=micro_batches)
            if evaluate:
                engine.evaluate(tokens[0])
        engine.step(1e-2)
        losses.append(engine.mean_over_ranks(total / micro_batches).item())
    losses.append(engine.evaluate(data[0, 0, 0]).item())
    return losses


def curves(topology: Topology, cases: list[tuple[dict[str, Any], int]]) -> list[list[float]]:
    return [train(build(topology, zero, FP32), micro_batches) for zero, micro_batches in cases]


@pytest.mark.parametrize(
    ("nodes", "local", "sizes"),
    [
        (2, 2, ("auto", "1")),
        nightly(1, 4, ("2",)),
        *(nightly(*grid, ("auto", "1")) for grid in ((1, 2), (2, 1), (4, 1), (2, 3))),
        nightly(2, 4, ("auto", "1", "2")),
    ],
)
def test_losses_equal_one_process(nodes: int, local: int, sizes: tuple[str, ...]) -> None:
    """fp32, every stage and group size. Sums of a node are rounded before those of another are added."""
    micro_batches = (1, 3) if sizes == ("2",) else (3,)
    cases = [
        ({"zero_stage": stage, "zero_gradient_partition_size": size}, count)
        for stage, size, count in itertools.product((1, 2, 3), sizes, micro_batches)
    ]
    cases += [(HPZ | AUTO, 3)] if "auto" in sizes else []
    results = on_ranks(nodes * local, curves, cases, ranks_per_node=local)
    assert all(result == results[0] for result in results[1:])
    for count in micro_batches:
        alone = Topology()
        engine, data, expected = build(alone, {"zero_stage": 0}, FP32), batches(nodes * local, count), []
        for step in data:
            parts = [tokens for micro_batch in step for tokens in micro_batch]
            losses = [
                engine.accumulate(tokens, index=index, micro_batches=len(parts))
                for index, tokens in enumerate(parts)
            ]
            engine.step(1e-2)
            expected.append(torch.stack(losses).mean().item())
        expected.append(engine.evaluate(data[0, 0, 0]).item())
        for (zero, its_count), losses in zip(cases, results[0], strict=True):
            if its_count == count:
                assert losses == pytest.approx(expected, rel=1e-6), (zero, count)


def first_errors(topology: Topology, per_node: int, zero: dict[str, Any]) -> list[str]:
    """What steps of one and two micro-batches say if hop 1 of the last one fails."""
    grid = Topology(topology.rank, topology.world_size, topology.rank % per_node, per_node)
    model, said = dataclasses.replace(MODEL, num_layers=1), []
    for micro_batches in (1, 2):
        engine = build(grid, zero, BF16, model)
        *earlier, last = batches(topology.world_size, micro_batches)[0, :, topology.rank]
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


def all_first_errors(topology: Topology) -> list[list[str]]:
    """In nodes of half the ranks, and in one node."""
    pairs = {"zero_stage": 2, "zero_gradient_partition_size": "2"}
    quantized, ranks = {"zero_quantized_gradients": True}, topology.world_size
    cases = [(ranks // 2, pairs), (ranks // 2, pairs | quantized), (ranks, pairs)]
    return [first_errors(topology, per_node, zero) for per_node, zero in cases]


def test_no_step_is_taken_if_hop_1_of_its_last_micro_batch_fails() -> None:
    """On CPUs an error is in the result of the work alone, which somebody has to read."""
    assert on_ranks(4, all_first_errors) == [[["hop 1 failed"] * 2] * 3] * 4


def weights_after(topology: Topology, cases: list[tuple[dict[str, Any], bool]]) -> list[list[bytes]]:
    """The bits of this rank's weights after steps of three micro-batches, with evaluations between or not."""
    found = []
    for zero, evaluate in cases:
        engine = build(topology, zero, BF16)
        train(engine, 3, evaluate=evaluate)
        found.append([unit.master.view(torch.uint8).numpy().tobytes() for unit in engine.units])
    return found


def test_an_evaluation_between_micro_batches_changes_nothing() -> None:
    settings = [ALL | AUTO, FOUR_BITS | AUTO]
    cases = [(zero, evaluate) for zero in settings for evaluate in (False, True)]
    for rank in on_ranks(4, weights_after, cases, ranks_per_node=2):
        for without, between in zip(rank[::2], rank[1::2], strict=True):
            assert without == between


def overflow(topology: Topology, settings: list[dict[str, Any]]) -> list[list[float]]:
    """`skipped` of three steps; the first micro-batch of the second has an Inf on the last rank."""
    found = []
    for zero in settings:
        engine = build(topology, zero, PrecisionConfig(fp16=True, initial_loss_scale=2.0**12))
        skipped = []
        for step in range(3):
            handles = []
            if step == 1 and topology.rank == topology.world_size - 1:
                parameter = engine.units[2].parameters[0]
                poison = lambda gradient: gradient.index_fill(0, torch.tensor(1), torch.inf)  # noqa: E731
                handles.append(parameter.register_hook(poison))
            for index in range(3):
                tokens = batches(topology.world_size, 3)[step, index, topology.rank]
                engine.accumulate(tokens, index=index, micro_batches=3)
                for handle in handles:
                    handle.remove()
            skipped.append(engine.step(1e-2).skipped.item())
        found.append(skipped)
    return found


def test_an_overflow_stays_in_the_accumulator_until_the_step() -> None:
    settings = [AUTO, FOUR_BITS | AUTO, {"zero_gradient_partition_size": "1"}]
    for rank in on_ranks(4, overflow, settings, ranks_per_node=2):
        assert rank == [[0.0, 1.0, 0.0]] * len(settings)


def moved(topology: Topology, directory: str) -> list[str]:
    """The kinds of states that a checkpoint of this grid does not bring back bit for bit, here or there."""
    engine = build(topology, ALL | AUTO, FP32)
    train(engine, 2)
    path = save(Path(directory), engine)
    differing = []
    for zero in (ALL | AUTO, {"zero_stage": 1}, {"zero_stage": 0}):
        other = build(topology, zero, FP32)
        load_checkpoint(path, other, TOKENIZER, with_optimizer=True)
        for kind in engine.states.kinds:
            ours, theirs = states_of(engine, kind), states_of(other, kind)
            if not all(torch.equal(ours[name], theirs[name]) for name in ours):
                differing.append(kind)
    return differing


def loaded(topology: Topology, directory: str) -> list[bytes]:
    """The whole states of a checkpoint as this grid loads it."""
    engine = build(topology, {"zero_stage": 2}, FP32)
    path = next(Path(directory).glob("iter_*"))
    load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)
    states = [states_of(engine, kind) for kind in engine.states.kinds]
    return [tensor.numpy().tobytes() for state in states for tensor in state.values()]


def test_any_grid_loads_what_another_one_owned(tmp_path: Path) -> None:
    """Who owns which shard depends on nodes and ranks; the checkpoint records it."""
    assert on_ranks(4, moved, str(tmp_path), ranks_per_node=2) == [[]] * 4
    alone = loaded(Topology(), str(tmp_path))
    for world, local in ((4, 4), (6, 2)):
        assert all(rank == alone for rank in on_ranks(world, loaded, str(tmp_path), ranks_per_node=local))
