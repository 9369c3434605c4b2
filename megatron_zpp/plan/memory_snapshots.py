"""The memory of a node that --buddy-snapshots takes."""

from megatron_zpp.plan.job import Job

COPIES = 2  # of a rank's states: those of the newest whole snapshot, and those of the one being taken


def node_bytes(owned: int, nodes: int, local: int) -> int:
    """Bytes of the files in memory on each node, for `local` ranks with `owned` bytes of states each.

    A node of several holds the states of the node before it as well.
    """
    return COPIES * owned * local * (2 if nodes > 1 else 1)


def snapshots_line(job: Job) -> str:
    """What the planned run with --buddy-snapshots needs of each node's memory."""
    kinds = 3 if job.communication.difference_format is None else 4  # weights, two moments; the reference
    owned = 4 * kinds * sum(layout.shard_numel for layout in job.layouts)
    files, process = node_bytes(owned, job.nodes, job.local), job.local * owned
    return (
        f"{files / 2**30:.2f} GiB of tmpfs on each node for --buddy-snapshots, and {process / 2**30:.2f} GiB "
        "of CPU memory of its ranks"
    )
