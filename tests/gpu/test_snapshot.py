"""Copies of the states on GPUs beside the training, on every rank and with every kind of states."""

from functools import partial
from typing import Any, Literal

import pytest
import torch

from megatron_zpp.checkpoint.snapshot import Snapshot, writing_thread
from megatron_zpp.checkpoint.states import shards_of
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from tests.gpu.ranks import GPUS, largest_in_core, on_gpus
from tests.zero.zeropp_engines import FOUR_BITS, batch, build

LATE = 2_000_000_000  # cycles, about a second: longer than a step of these models
SETTINGS = [
    {},
    {"zero_stage": 0},
    FOUR_BITS,
    {"zero_offload_optimizer": True},
    FOUR_BITS | {"zero_offload_optimizer": True},
]


def step(engine: ZeroEngine, number: int, snapshot: Snapshot | None = None, *, late: bool = False) -> None:
    """`late`: the new weights, or their differences, on the communication streams."""
    engine.accumulate(batch(engine.topology, number), index=0, micro_batches=1)
    if snapshot is not None:
        snapshot.settle()
    for stream in engine._communication.comm_streams if late else ():
        stream.submit(partial(torch.cuda._sleep, LATE))
    engine.step(1e-2)


def differing(
    topology: Topology, settings: list[dict[str, Any]], late: Literal["weights", "copies"]
) -> list[list[str]]:
    """For each setting, the copies that are not the states of the step after which they were taken.

    The expected states are read after the copies were submitted, so that what this waits for does not help
    them.
    """
    found = []
    for zero in settings:
        engine = build(topology, zero)
        step(engine, 0)
        snapshot = Snapshot(shards_of(engine, with_optimizer=True))
        wrong = []
        for number in range(1, 6, 2):
            step(engine, number, late=late == "weights")
            if late == "copies":
                with torch.cuda.stream(snapshot._stream):
                    torch.cuda._sleep(LATE)
            snapshot.take(partial(shards_of, engine, with_optimizer=True))
            expected = {name: shard.clone() for name, shard in shards_of(engine, with_optimizer=True).items()}
            step(engine, number + 1, snapshot)
            copies = snapshot.wait()
            wrong += [name for name, shard in expected.items() if not torch.equal(copies[name], shard.cpu())]
        engine.close()
        found.append(wrong)
    return found


@pytest.mark.parametrize("late", ["weights", pytest.param("copies", marks=pytest.mark.gpu_long)])
@pytest.mark.parametrize(("nodes", "local"), largest_in_core((2, 1), (2, 2)))
def test_copies_are_the_states_of_their_step_on_every_rank(nodes: int, local: int, late: str) -> None:
    """References too, which another stream changes after the step that the copies follow."""
    found = on_gpus(nodes, local, differing, SETTINGS, late)
    assert found == [[[] for _ in SETTINGS]] * nodes * local


def contexts_on_the_first_gpu(topology: Topology) -> list[bool]:
    """Whether this process has a context on GPU 0 before and after a writer's thread waits for copies."""
    engine = build(topology, {})
    snapshot = Snapshot(shards_of(engine, with_optimizer=True))
    step(engine, 0)
    snapshot.take(partial(shards_of, engine, with_optimizer=True))
    found = [torch._C._cuda_hasPrimaryContext(0)]
    with writing_thread("save", engine.device) as writer:
        writer.submit(snapshot.wait).result()
    engine.close()
    return [*found, torch._C._cuda_hasPrimaryContext(0)]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_thread_that_waits_for_copies_takes_no_memory_of_another_gpu() -> None:
    """Of each rank of a node it would be a few hundred MiB of GPU 0."""
    before, after = on_gpus(1, 2, contexts_on_the_first_gpu)[1]
    assert before == after
