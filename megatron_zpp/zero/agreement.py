"""Makes sure, before anything is built, that all ranks were started with the same settings."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.zero.topology import Topology


def check_agreement(settings: dict[str, dict[str, Any]], topology: Topology, device: torch.device) -> None:
    """Compares `settings`, by part and field, over all ranks; every rank must call it.

    Raises ValueError on every rank, with the first field that differs and the ranks that have another value
    than rank 0.
    """
    if topology.world_size == 1:
        return
    fields = {f"{part}.{name}": value for part, values in settings.items() for name, value in values.items()}
    for rank, (names,) in enumerate(_gather([_digest(sorted(fields))], topology, device)):
        if names != _digest(sorted(fields)):
            raise ValueError(f"rank {rank} runs another version of the program than rank {topology.rank}")
    everyone = _gather([_digest(fields[name]) for name in sorted(fields)], topology, device)
    for name, *digests in zip(sorted(fields), *everyone, strict=True):
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise ValueError(
                f"{name} differs between ranks: rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} "
                f"and rank 0 were started with other values (rank {topology.rank}: {fields[name]}); start "
                "all ranks with the same flags"
            )


def _gather(digests: list[int], topology: Topology, device: torch.device) -> list[list[int]]:
    """Every rank's digests."""
    own = torch.tensor(digests, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(topology.world_size)]
    dist.all_gather(everyone, own)
    return torch.stack(everyone).tolist()


def _digest(value: Any) -> int:
    return int.from_bytes(
        hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True
    )
