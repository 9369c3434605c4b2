"""The memory of a node's ranks for copies of their states, which --async-save writes."""

from collections.abc import Iterable

from megatron_zpp.plan.job import Job


def copies_bytes(job: Job) -> int:
    """Bytes of a node's ranks for copies of the states that are saved, pinned if these are on GPUs.

    An offloaded optimizer has weights and moments on the CPU, and the reference on the GPU.
    """
    states = job.optimizer.saved_bytes if job.save_optim else job.optimizer.saved_bytes[:1]
    shards = [layout.shard_numel for layout in job.layouts]
    sizes = [int(nbytes * numel) for tensors in states for nbytes in tensors for numel in shards]
    copies = sum(sizes) if job.zero.zero_offload_optimizer else pinned_bytes(sizes)
    if job.save_optim and job.communication.differences is not None:
        copies += pinned_bytes(4 * numel for numel in shards)  # the reference
    return job.local * copies


def pinned_bytes(sizes: Iterable[int]) -> int:
    """What pinned copies of tensors of these bytes take: torch rounds each up to a power of two."""
    return sum(1 << (size - 1).bit_length() for size in sizes if size)
