"""Counts the bytes that this rank sends, by the link that they cross."""

from megatron_zpp.mesh import Mesh


class TrafficLedger:
    """Bytes sent since the last `take`: to ranks of this node, and to ranks of other nodes."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank, self._near = mesh.rank, set(mesh.ranks(*mesh.inside_node))
        self.intra_node = self.inter_node = 0

    def count(self, rank: int, nbytes: int) -> None:
        """Count `nbytes` to a rank; what this rank keeps is not sent."""
        if rank not in self._near:
            self.inter_node += nbytes
        elif rank != self._rank:
            self.intra_node += nbytes

    def take(self) -> tuple[int, int]:
        """Return (bytes inside the node, bytes between nodes) since the last call."""
        taken = self.intra_node, self.inter_node
        self.intra_node = self.inter_node = 0
        return taken
