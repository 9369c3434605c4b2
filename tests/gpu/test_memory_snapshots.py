"""Memory snapshots on GPUs: what is copied beside the training, restarts from it, and its end over NCCL."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megatron_zpp.checkpoint.snapshot import Snapshot, writing_thread
from megatron_zpp.checkpoint.states import shards_of
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from tests.gpu.ranks import GPUS, largest_in_core, on_gpus
from tests.gpu.test_fp8 import HELD, needs_fp8
from tests.support import Run
from tests.train import test_memory_snapshots as cases
from tests.train.test_end_of_memory_snapshots import left_in_memory
from tests.train.test_faults import weights
from tests.zero.test_quantized import FOUR_BITS, batch
from tests.zero.zeropp_engines import build

LATE = 2_000_000_000  # cycles, about a second: longer than a step of these models
TINY = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --seq-length 64 --micro-batch-size 4 "
    "--lr 3e-3 --no-compile"
).split()
DELTA4 = "--zero-quantized-weights-format delta4 --zero-quantized-gradients-format rotated4".split()
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
    topology: Topology, settings: list[dict[str, Any]], late: Literal["weights", "copies"], settles: bool
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
            step(engine, number + 1, snapshot if settles else None)
            copies = snapshot.wait()
            wrong += [name for name, shard in expected.items() if not torch.equal(copies[name], shard.cpu())]
        engine.close()
        found.append(wrong)
    return found


@pytest.mark.parametrize("late", ["weights", pytest.param("copies", marks=pytest.mark.gpu_long)])
@pytest.mark.parametrize(("nodes", "local"), largest_in_core((2, 1), (2, 2)))
def test_copies_are_the_states_of_their_step_on_every_rank(nodes: int, local: int, late: str) -> None:
    """References too, which another stream changes after the step that the copies follow."""
    found = on_gpus(nodes, local, differing, SETTINGS, late, True)
    assert found == [[[] for _ in SETTINGS]] * nodes * local


@pytest.mark.gpu_long
def test_copies_that_no_step_waits_for_are_found_to_differ() -> None:
    """Otherwise the test above would find nothing."""
    for rank in on_gpus(2, 1, differing, [{}, FOUR_BITS], "copies", False):
        assert all(rank)


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


def test_memory_is_freed_after_the_slowest_rank_of_a_node(tmp_path: Path) -> None:
    """The sum by which ranks wait for each other returns at once on a GPU."""
    assert on_gpus(1, 2, left_in_memory, str(tmp_path), share_one_gpu=True) == [[], []]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[cases.Nodes]:
    """Two nodes that may share a GPU, and talk over TCP as NCCL takes them for different hosts."""
    place = cases.place

    def on_gpu(rank: int, local: int) -> dict[str, str]:
        host = {"NCCL_HOSTID": f"node{rank // local}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        return place(rank, local) | host

    monkeypatch.setattr(cases, "place", on_gpu)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield cases.Nodes(Path(memory), tmp_path, TINY)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["--bf16"], id="bf16", marks=pytest.mark.gpu_long),
        pytest.param(["--fp16"], id="fp16", marks=pytest.mark.gpu_long),
        pytest.param(["--bf16", "--zero-offload-optimizer"], id="offload", marks=pytest.mark.gpu_long),
        pytest.param(["--bf16", *cases.ZEROPP, *DELTA4], id="delta4"),
        pytest.param(["--bf16", *HELD.split()], id="8-bit weights", marks=[needs_fp8, pytest.mark.gpu_long]),
        pytest.param(
            ["--bf16", *HELD.split(), *cases.ZEROPP, *DELTA4],
            id="8-bit weights and delta4",
            marks=[needs_fp8, pytest.mark.gpu_long],
        ),
    ],
)
def test_a_killed_run_goes_on_from_the_memory_of_its_buddy(
    nodes: cases.Nodes, tmp_path: Path, settings: list[str]
) -> None:
    """With the bits of a run that nobody disturbed. There is no checkpoint, and a spare replaces a node."""
    argv = [*TINY, *cases.LENGTH, *cases.MODEL, *settings]
    save = tmp_path / "whole"
    with Run(tmp_path / "log", 2) as run:
        for rank in range(2):
            run.start(rank, *argv, "--save", str(save), **cases.place(rank, 1))
        assert set(run.statuses().values()) == {0}, run.err(0)
    nodes.argv += settings
    nodes.crash(13, 10)
    nodes.lose(1)
    assert "loaded iteration 10 in memory; resuming at iteration 10, 80 samples" in nodes.finish()
    assert weights(nodes.save, cases.END) == weights(save, cases.END)
