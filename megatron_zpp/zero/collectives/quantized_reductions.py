"""qgZ: reductions of gradients that travel as block-quantised messages (ZeRO++, 2306.10209, section 3.3)."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.two_hops import TwoHops
from megatron_zpp.zero.grad_segments import GradSegment, join
from megatron_zpp.zero.reduction_plan import ReductionPlan


class _FirstHop:
    """Quantises what other ranks of the first hop sum, and exchanges the messages."""

    def __init__(self, plan: ReductionPlan, comm_stream: CommStream, operations: Operations) -> None:
        assert plan.quant_format is not None
        self.format, self._operations = plan.quant_format, operations
        self._comm_stream, buffers = comm_stream, plan.buffers
        self._joined = comm_stream.zeros(*buffers.joined)
        self._sent = comm_stream.zeros(*buffers.to_send)
        self._received = comm_stream.zeros(*buffers.received)

    def joined(self, sent: Sequence[GradSegment], numel: int) -> tuple[Tensor, list[Pending]]:
        """The whole gradient (numel,), and the work that puts it together, if it has several segments."""
        if len(sent) == 1:
            return sent[0].flat, []
        full = self._joined.view(sent[0].flat.dtype)[:numel]
        return full, [self._comm_stream.submit(partial(join, sent, full))]

    def exchange(self, slices: Tensor, numel: int) -> Tensor:
        """A message from each rank: (ranks, message_bytes(numel)). `slices` has a row for each owner."""
        ranks, nbytes = len(self._comm_stream.ranks), self.format.message_bytes(numel)
        sent, received = (buffer[: ranks * nbytes] for buffer in (self._sent, self._received))
        self._operations.quantize(slices, sent.view(ranks, nbytes), self.format)
        self._comm_stream.all_to_all(received, sent)
        return received.view(ranks, nbytes)


class QuantizedOneHopReduceScatter:
    """Between ranks of one node, or nodes of one rank: every rank decodes and sums the messages for it."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[CommStream], operations: Operations
    ) -> None:
        (self._comm_stream,) = comm_streams
        self._operations = operations
        self._first = _FirstHop(plan, self._comm_stream, operations)

    def reduce(
        self,
        sent: Sequence[GradSegment],
        total: Tensor,
        *,
        add: bool,
        squares: Tensor | None = None,
        error: Tensor | None = None,
    ) -> Pending:
        """See Reduction."""
        assert squares is None
        full, pending = self._first.joined(sent, len(total) * len(self._comm_stream.ranks))

        def work() -> None:
            received = self._first.exchange(full.view(-1, len(total)), len(total))
            self._operations.sum_into(received, total, self._first.format, add=add)

        pending.append(self._comm_stream.submit(work))
        return _all_of(pending)


class QuantizedTwoHopReduceScatter:
    """Gradients cross each link between nodes once.

    Hop 1, inside the node: a rank gets what its node has for its cross-node ranks, in the order of the nodes;
    the quantisation puts each slice there. It sums, and hop 2, between nodes, takes each slice to its owner.
    The hops are pipelined by chunk.
    """

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[CommStream], operations: Operations
    ) -> None:
        inside, between = comm_streams
        self._plan, self._operations = plan, operations
        self._ranks, self._nodes = len(inside.ranks) * len(between.ranks), len(between.ranks)
        self._first = _FirstHop(plan, inside, operations)
        self._hops = TwoHops(inside, between, plan.buffers)

    def reduce(
        self,
        sent: Sequence[GradSegment],
        total: Tensor,
        *,
        add: bool,
        squares: Tensor | None = None,
        error: Tensor | None = None,
    ) -> Pending:
        """See Reduction. `error` (plan.error_numel,) is laid out by chunks."""
        assert squares is None
        full, pending = self._first.joined(sent, len(total) * self._ranks)
        for chunk in self._plan.chunks(len(total)):
            slices = full.view(-1, len(total))[:, chunk.start : chunk.stop]  # row r is for rank r
            lost = None if error is None else error[self._nodes * chunk.start : self._nodes * chunk.stop]
            pending.append(self._reduce_chunk(slices, total[chunk.start : chunk.stop], add, lost))
        return _all_of(pending)

    def _reduce_chunk(self, slices: Tensor, total: Tensor, add: bool, error: Tensor | None) -> Pending:
        quant_format = self._first.format

        def fill(sums: Tensor) -> None:
            received = self._first.exchange(slices, self._nodes * len(total))
            messages = sums.view(self._nodes, -1)
            self._operations.sum_quantize(received, messages, quant_format, quant_format, error=error)

        def take(received: Tensor) -> None:
            messages = received.view(self._nodes, -1)
            self._operations.sum_into(messages, total, quant_format, add=add)

        return self._hops.submit(self._nodes * quant_format.message_bytes(len(total)), fill, take)


def _all_of(pending: Sequence[Pending]) -> Pending:
    """Waits for each, since each can fail."""
    return Pending(lambda: [one.wait() for one in pending])
