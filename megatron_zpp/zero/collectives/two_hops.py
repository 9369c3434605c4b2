"""Runs reductions in two hops, inside a node and between nodes, so that both links are busy at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending


class TwoHops:
    """Hop 1 of a reduction runs while hop 2 of the one before it is on the wire.

    Hop 1 makes the sums of this node, a part for each node, and hop 2 takes each part to this rank's
    counterpart there. Sums lie in one of two buffers in turn, which is not filled again before it is sent.
    """

    def __init__(self, inside: CommStream, between: CommStream, numel: int, dtype: torch.dtype) -> None:
        """`between` has the ranks of this one's place on every node; sums have at most `numel` elements."""
        self._inside, self._between = inside, between
        self._sums = [between.zeros(numel, dtype) for _ in range(2)]
        self._received = between.zeros(numel, dtype)
        self._sending = [Pending(), Pending()]  # the work that reads each of `_sums`
        self._turn = 0

    def submit(self, numel: int, fill: Callable[[Tensor], None], take: Callable[[Tensor], None]) -> Pending:
        """`fill` writes this node's sums (numel,), and `take` gets all nodes' sums for this rank (numel,).

        `fill` runs on the stream inside the node. What `take` gets is in the order of the nodes, and is this
        call's until `take` has returned.
        """
        turn, self._turn = self._turn, 1 - self._turn
        sums, received, sent_before = self._sums[turn][:numel], self._received[:numel], self._sending[turn]

        def inside() -> None:
            sent_before.wait()
            fill(sums)

        summed = self._inside.submit(inside)

        def between() -> None:
            summed.wait()
            self._between.all_to_all(received, sums)
            take(received)

        self._sending[turn] = self._between.submit(between)
        return self._sending[turn]
