"""The memory of a node's ranks for copies of their states, which --async-save writes."""

from collections.abc import Iterable

from megatron_zpp.plan.job import Job


def copies_bytes(job: Job) -> int:
    """Bytes of a node's ranks for copies of the states that are saved, pinned if these are on GPUs.

    An offloaded optimizer has weights and moments on the CPU, and the reference on the GPU.
    """
    kinds = 3 if job.communication.differences is None else 4  # weights, two moments; the reference
    kinds = kinds if job.save_optim else 1
    shards = [4 * layout.shard_numel for layout in job.layouts]
    plain = min(kinds, 3) if job.zero.zero_offload_optimizer else 0
    return job.local * (plain * sum(shards) + (kinds - plain) * pinned_bytes(shards))


def pinned_bytes(sizes: Iterable[int]) -> int:
    """What pinned copies of tensors of these bytes take: torch rounds each up to a power of two."""
    return sum(1 << (size - 1).bit_length() for size in sizes if size)
