"""Counts the bytes that this rank sends, by the link that they cross."""

from collections.abc import Sequence

from megatron_zpp.mesh import Mesh


class TrafficLedger:
    """Bytes sent since the last `take`: to ranks of this node, and to ranks of other nodes."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank, self._near = mesh.rank, set(mesh.ranks(*mesh.inside_node))
        self.intra_node = self.inter_node = 0

    def around_the_ring(self, ranks: Sequence[int], nbytes: int) -> None:
        """Count `nbytes` to the next of `ranks`, the only one to which ring collectives send."""
        group_rank = ranks.index(self._rank)
        self._count(ranks[(group_rank + 1) % len(ranks)], nbytes)

    def to_every_peer(self, ranks: Sequence[int], nbytes: int) -> None:
        """Count `nbytes` to each of the other `ranks`, as an all-to-all sends them."""
        self.to_peers(ranks, [nbytes] * len(ranks))

    def to_peers(self, ranks: Sequence[int], nbytes: Sequence[int]) -> None:
        """Count so many bytes to each of the `ranks`; what this rank keeps is not sent."""
        for peer, count in zip(ranks, nbytes, strict=True):
            if peer != self._rank:
                self._count(peer, count)

    def inside_node(self, nbytes: int) -> None:
        """Count `nbytes` to ranks of this node."""
        self.intra_node += nbytes

    def take(self) -> tuple[int, int]:
        """Return (bytes inside the node, bytes between nodes) since the last call."""
        taken = self.intra_node, self.inter_node
        self.intra_node = self.inter_node = 0
        return taken

    def _count(self, peer: int, nbytes: int) -> None:
        if peer in self._near:
            self.intra_node += nbytes
        else:
            self.inter_node += nbytes
