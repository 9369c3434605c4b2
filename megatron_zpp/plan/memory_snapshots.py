"""The memory of a node that --buddy-snapshots takes."""

COPIES = 2  # of a rank's states: those of the newest whole snapshot, and those of the one being taken


def node_bytes(owned: int, nodes: int, local: int) -> int:
    """Bytes of the files in memory on each node, for `local` ranks with `owned` bytes of states each.

    A node of several holds the states of the node before it as well.
    """
    return COPIES * owned * local * (2 if nodes > 1 else 1)
