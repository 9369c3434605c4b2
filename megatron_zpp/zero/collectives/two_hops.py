"""Runs reductions in two hops, inside a node and between nodes, so that both links are busy at once."""

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending
from megatron_zpp.zero.reduction_plan import ReductionBuffers


class TwoHops:
    """Hop 1 of a reduction runs while hop 2 of the one before it is on the wire.

    Hop 1 makes the sums of this node, a part for each node, and hop 2 sends each part to the cross-node rank
    of that node. Sums lie in one of two buffers in turn, which is not filled again before it is sent. The two
    turns have a stream between nodes each, so that two hops 2 can be on the wire.
    """

    def __init__(self, inside: CommStream, between: Sequence[CommStream], buffers: ReductionBuffers) -> None:
        """`inside` has the ranks of this rank's node, and both of `between` its cross-node ranks."""
        assert len(between) == 2
        self._inside, self._between = inside, between
        self._sums = [stream.zeros(*buffers.node_sums) for stream in between]
        self._received = [stream.zeros(*buffers.received_sums) for stream in between]
        self._sending = [Pending(), Pending()]  # the work that reads each of `_sums`
        self._turn = 0

    def submit(self, numel: int, fill: Callable[[Tensor], None], take: Callable[[Tensor], None]) -> Pending:
        """`fill` writes this node's sums (numel,), and `take` gets all nodes' sums for this rank (numel,).

        `fill` runs on the stream inside the node. What `take` gets is in the order of the nodes. Its memory
        belongs to this call until `take` returns.
        """
        turn, self._turn = self._turn, 1 - self._turn
        sums, received, sent_before = (
            self._sums[turn][:numel],
            self._received[turn][:numel],
            self._sending[turn],
        )
        stream = self._between[turn]

        def inside() -> None:
            sent_before.wait()
            fill(sums)

        summed = self._inside.submit(inside)

        def between() -> None:
            summed.wait()
            stream.all_to_all(received, sums)
            take(received)

        self._sending[turn] = stream.submit(between)
        return self._sending[turn]
