"""Products of tensor ranks beside exchanges, on two GPUs: the same results, with less waiting."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.distributed.peer_rows import CopiedRows, others_first, own_first, region_bytes
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.distributed.topology import Topology
from tests.gpu.ranks import on_gpus
from tests.gpu.steady import losses_of, parts_of_steps, step_of
from tests.gpu.test_tensor_parallel import (
    BATCH,
    BF16,
    FP32,
    LENGTH,
    MODELS,
    PLANNED,
    VOCAB,
    build,
    peak_and_plan,
)

LONG, STEPS = 2048, 2
WIDE = {"num_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": LONG}

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def copied(topology: Topology) -> int:
    """How many of 2,000 exchanges brought other rows than they should, while the GPUs are out of step."""
    ranks, own_rank = topology.world_size, topology.rank
    group, wrong = TensorGroup(range(ranks), own_rank), torch.zeros((), device="cuda", dtype=torch.int64)
    rows, width = 96, 640

    def sent(number: int, rank: int) -> Tensor:
        places = torch.arange(rows * width, device="cuda").view(rows, width)
        return ((places + 31 * number + 7 * rank) % 61).bfloat16()  # of which sums are exact

    for number in range(2000):
        if number % 7 == 3 * own_rank:
            torch.cuda._sleep(200_000)  # about 0.1 ms on this rank alone
        own = sent(number, own_rank)
        peers = CopiedRows(group, rows, width, own)
        peers.gather(own, whole=number % 2 == 0)
        for rank in others_first(group)[:-1]:
            peers.send(sent(number, 11 * rank + own_rank), rank)
        peers.own().copy_(sent(number, 12 * own_rank))
        expected = torch.stack([sent(number, rank) for rank in range(ranks)])
        if number % 2 == 0:
            wrong += (peers.gathered().view(expected.shape) != expected).sum()
        else:
            for rank in own_first(group)[1:]:
                wrong += (peers.rows_of(rank) != expected[rank]).sum()
        parts = [sent(number, 11 * own_rank + rank).float() for rank in range(ranks)]
        wrong += (peers.sum() != torch.stack(parts).sum(0)).sum()
    return int(wrong.item())


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_bring_the_rows_of_their_own_exchange(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    assert on_gpus(1, ranks, copied) == [0] * ranks


def losses(topology: Topology) -> list[tuple[list[float], list[float]]]:
    """Of six steps with and without overlap, for each model, in fp32 without graphs and in bf16 with them."""
    data = torch.randint(VOCAB, (6, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(8))

    def run(model: str, precision: object, compiled: bool, overlapped: bool) -> list[float]:
        engine = build(topology, 2, model, precision, compiled, overlapped)
        found = losses_of(engine, data[:, None])
        engine.close()
        return found

    return [
        (run(model, precision, compiled, False), run(model, precision, compiled, True))
        for model in MODELS
        for precision, compiled in ((FP32, False), (BF16, True))
    ]


def test_overlap_changes_no_loss() -> None:
    """But for the order of sums inside products, whose sizes differ."""
    first, second = on_gpus(1, 2, losses)
    assert first == second
    for waiting, overlapped in first:
        assert overlapped == pytest.approx(waiting, rel=2**-8)


def exposed(topology: Topology, overlapped: bool, directory: str) -> float:
    """Milliseconds per step in which nothing but communication runs, of bf16 layers as wide as 6.7B's."""
    engine = build(topology, 2, "gpt", BF16, True, overlapped, **WIDE)
    tokens = torch.randint(VOCAB, (BATCH, LONG + 1), device="cuda")

    def steps(count: int) -> None:
        dist.barrier()  # a profiler starts later on one rank, for which an exchange of the other would wait
        for _ in range(count):
            step_of(engine, tokens, rate=1e-4)
        torch.cuda.synchronize()

    steps(3)
    file = Path(directory) / f"rank{topology.rank}.json.gz"
    parts = parts_of_steps(lambda: steps(STEPS), STEPS, file)
    engine.close()
    return parts["exposed communication"]


@pytest.mark.gpu_long
def test_overlap_exposes_less_communication(tmp_path: Path) -> None:
    """Six exchanges of a layer are not waited for any more.

    Counted on the rank that waits less: the other one waits for that one's host, too.
    """
    waiting, overlapped = (min(on_gpus(1, 2, exposed, kind, str(tmp_path))) for kind in (False, True))
    assert 0 < overlapped < 0.5 * waiting


def second_peak_and_plan(topology: Topology, compiled: bool) -> tuple[int, int]:
    """After a run that pays for the workspaces of cuBLAS: 32 MiB each for forward and backward, on Hopper."""
    peak_and_plan(topology, 2, compiled, True)
    return peak_and_plan(topology, 2, compiled, True)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.gpu_long)])
def test_the_peak_of_ranks_that_copy_is_planned(compiled: bool) -> None:
    """Within 3%, without what the ranks write for each other: torch does not count it."""
    rows = BATCH * PLANNED["seq_length"] // 2
    regions = region_bytes(2, rows, PLANNED["hidden_size"], torch.bfloat16)
    for measured, planned in on_gpus(1, 2, second_peak_and_plan, compiled):
        assert planned - regions == pytest.approx(measured, rel=0.03)
