"""GB/s that each rank sends in collectives between nodes; on one node, inside it.

Ranks with the same place on every node form a group, as in a reduction between nodes, and all groups work at
once. Beside each collective alone there is an all-gather beside an all-to-all, each on a communicator and a
stream of its own, which is what a backward of ZeRO-3 has on the link. Sizes are what one rank sends in each
collective, rates what it sends in all of them together.

torchrun starts it.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import program_parser
from benchmarks.contest.protocol import Rank, join

MEGABYTES, SECONDS = (25, 100), 0.7  # that a collective sends; of each figure
Collective = Callable[[], dist.Work]

CASES: dict[str, tuple[str, ...]] = {  # simultaneous collectives, the second on a second communicator
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("all_to_all",),
    "all_gather_beside_all_to_all": ("all_gather", "all_to_all"),
}


def collectives(sent_bytes: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, Collective]:
    """Collectives that each send `sent_bytes` from every rank of `group` to others."""
    ranks = group.size()
    part = sent_bytes // (ranks - 1)

    def buffer(nbytes: int) -> Tensor:
        return torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)

    shard, whole, received = buffer(part), buffer(part * ranks), buffer(part * ranks)
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard, group=group, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(received, whole, group=group, async_op=True),
    }


def gigabytes_per_second(rank: Rank, running: list[Collective], sent_bytes: int) -> float:
    """The rate of each rank with the collectives of `running` in parallel."""

    def once() -> None:
        for work in [start() for start in running]:
            work.wait()

    def timed(repeats: int) -> float:
        if rank.on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        for _ in range(repeats):
            once()
        if rank.on_gpu:
            torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - started, device=rank.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    timed(2)
    repeats = max(3, int(SECONDS / (timed(2) / 2)))
    return round(len(running) * sent_bytes * repeats / timed(repeats) / 1e9, 3)


def main() -> None:
    """Every rank runs this; rank 0 writes the rates by collective and megabytes."""
    parser = program_parser(__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    rank = join(options)
    ranks_per_node = rank.world_size // options.nodes
    step = ranks_per_node if options.nodes > 1 else 1
    mine = []
    for _ in range(2):  # two communicators, so that two collectives can run in parallel
        groups = [dist.new_group(list(range(first, rank.world_size, step))) for first in range(step)]
        mine.append(groups[rank.rank % step])
    rates: dict[str, dict[str, float]] = {}
    for size in MEGABYTES:
        communicators = [collectives(size * 10**6, group, rank.device) for group in mine]
        for name, at_once in CASES.items():
            running = [by_name[each] for by_name, each in zip(communicators, at_once, strict=False)]
            rates.setdefault(name, {})[f"{size}MB"] = gigabytes_per_second(rank, running, size * 10**6)
    if rank.rank == 0:
        options.report.write_text(json.dumps(rates))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
