"""The memory of a node that --buddy-snapshots takes, and copies of the states for saves."""

from collections.abc import Iterable, Iterator

from megatron_zpp.plan.job import Job

COPIES = 2  # of a rank's states: those of the newest whole snapshot, and those of the one being taken


def node_bytes(owned: int, nodes: int, local: int) -> int:
    """Bytes of the files in memory on each node, for `local` ranks with `owned` bytes of states each.

    A node of several holds the states of the node before it as well.
    """
    return COPIES * owned * local * (2 if nodes > 1 else 1)


def pinned_bytes(sizes: Iterable[int]) -> int:
    """What pinned copies of tensors of these bytes take: torch rounds each up to a power of two."""
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def snapshot_lines(job: Job) -> Iterator[str]:
    """What --buddy-snapshots and --async-save of the planned run need of each node's memory."""
    kinds = 3 if job.communication.difference_format is None else 4  # weights, two moments; the reference
    if job.memory_snapshots:
        owned = 4 * kinds * sum(layout.shard_numel for layout in job.layouts)
        files, process = node_bytes(owned, job.nodes, job.local), _copied(job, kinds)
        yield (
            f"{files / 2**30:.2f} GiB of tmpfs on each node for --buddy-snapshots, and {process / 2**30:.2f} "
            "GiB of CPU memory of its ranks"
        )
    if job.async_save:
        process = _copied(job, kinds if job.save_optim else 1)
        yield f"{process / 2**30:.2f} GiB of CPU memory of the ranks of each node for --async-save"


def _copied(job: Job, kinds: int) -> int:
    """Bytes of a node's ranks for copies of so many kinds of fp32 states, pinned if they are on GPUs.

    An offloaded optimizer has weights and moments on the CPU, and the reference on the GPU.
    """
    shards = [4 * layout.shard_numel for layout in job.layouts]
    plain = min(kinds, 3) if job.zero.zero_offload_optimizer else 0
    return job.local * (plain * sum(shards) + (kinds - plain) * pinned_bytes(shards))
