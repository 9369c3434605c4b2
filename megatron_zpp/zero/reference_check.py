"""Finds nodes whose references of weight differences are not the same."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.zero.sharded_unit import Unit


def differing_references(
    units: Sequence[Unit], references: Sequence[Tensor], holders: Sequence[int]
) -> str | None:
    """The first unit whose reference is not the same on all nodes, and the ranks; None if all are.

    `holders` has for each rank of the job the first one that holds the same part of references.
    Every rank must call it, and all get the same answer. It waits for the device.
    """
    digests = torch.stack([_digest(reference) for reference in references])  # (units,)
    found = [torch.empty_like(digests) for _ in holders]
    dist.all_gather(found, digests)
    by_rank = torch.stack(found).cpu()
    for index, unit in enumerate(units):
        digest = by_rank[:, index]
        ranks = [rank for rank, holder in enumerate(holders) if digest[rank] != digest[holder]]
        if ranks:
            name = unit.names[0].rsplit(".", 1)[0]
            return f"unit {index} (with {name}) on ranks {', '.join(map(str, ranks))}"
    return None


def _digest(flat: Tensor) -> Tensor:
    """A hash () int64 of the bits of an fp32 tensor (n,), in pieces, so that it takes little memory.

    Sums with odd factors that differ from element to element see a changed bit and a swap.
    """
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), 1 << 22):
        bits = flat[start : start + (1 << 22)].view(torch.int32).long()
        place = torch.arange(start, start + len(bits), device=flat.device)
        total += (bits * (place * 0x9E3779B1 | 1)).sum()
    return total
