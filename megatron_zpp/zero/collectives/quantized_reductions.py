"""qgZ: reductions of gradients that travel as block-quantised messages (ZeRO++, 2306.10209, section 3.3)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.first_hop import Fold, QuantizedFirstHop, all_of, owning
from megatron_zpp.zero.collectives.two_hops import TwoHops
from megatron_zpp.zero.grad_segments import GradSegment
from megatron_zpp.zero.reduction_plan import ReductionPlan


class QuantizedOneHopReduceScatter:
    """Between ranks of one node, or nodes of one rank: every rank decodes and sums the messages for it."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[CommStream], operations: Operations
    ) -> None:
        (comm_stream,) = comm_streams
        self._first = QuantizedFirstHop(plan, comm_stream, operations)

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
        return self._first.sum(sent, total, add=add)


class QuantizedTwoHopReduceScatter:
    """Gradients cross each link between nodes once.

    Hop 1, inside the node: a rank gets what its node has for its cross-node ranks, in the order of the nodes.
    It sums, and hop 2, between nodes, takes each slice to its owner. The hops are pipelined by chunk.
    """

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[CommStream], operations: Operations
    ) -> None:
        inside, between, *fold = comm_streams
        self._plan, self._operations = plan, operations
        self._ranks, self._nodes = plan.groups * len(inside.ranks) * plan.nodes, plan.nodes
        self._first = QuantizedFirstHop(plan, inside, operations)
        self._fold = Fold(plan, fold[0], operations) if fold else None
        self._folded = inside.zeros(*plan.buffers.exact)
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
        if self._fold is not None:
            assert not add
            accumulated = torch.empty(self._plan.groups * self._nodes * len(total), device=total.device)
            self.accumulate(sent, accumulated, add=False)
            return owning(accumulated, self.reduce_accumulated(accumulated, total, error=error))
        full, pending = self._first.joined(sent, len(total) * self._ranks)
        for chunk in self._plan.chunks(len(total)):
            slices = full.view(-1, len(total))[:, chunk.start : chunk.stop]
            lost = None if error is None else error[self._nodes * chunk.start : self._nodes * chunk.stop]
            pending.append(self._reduce_chunk(slices, total[chunk.start : chunk.stop], add, lost))
        return all_of(pending)

    def accumulate(self, sent: Sequence[GradSegment], accumulated: Tensor, *, add: bool) -> Pending:
        """See GroupReduction."""
        return self._first.sum(sent, accumulated, add=add)

    def reduce_accumulated(
        self,
        accumulated: Tensor,
        total: Tensor,
        *,
        squares: Tensor | None = None,
        error: Tensor | None = None,
    ) -> Pending:
        """See GroupReduction. `accumulated` and `error` are laid out by chunks."""
        assert squares is None
        pending = []
        for chunk in self._plan.chunks(len(total)):
            first, stop = self._nodes * chunk.start, self._nodes * chunk.stop
            sums = accumulated[self._plan.groups * first : self._plan.groups * stop]
            lost = None if error is None else error[first:stop]
            pending.append(self._encode_chunk(sums, total[chunk.start : chunk.stop], lost))
        return all_of(pending)

    def _reduce_chunk(self, slices: Tensor, total: Tensor, add: bool, error: Tensor | None) -> Pending:
        quant_format = self._first.format

        def fill(sums: Tensor) -> None:
            received = self._first.exchange(slices, self._nodes * len(total))
            messages = sums.view(self._nodes, -1)
            self._operations.sum_quantize(received, messages, quant_format, quant_format, error=error)

        return self._send(fill, total, add)

    def _encode_chunk(self, accumulated: Tensor, total: Tensor, error: Tensor | None) -> Pending:
        quant_format = self._first.format

        def fill(sums: Tensor) -> None:
            node_sum, messages = accumulated, sums.view(self._nodes, -1)
            if self._fold is not None:
                node_sum = self._folded[: self._nodes * len(total)]
                self._fold.sum_now(accumulated, node_sum)
            if error is not None:
                node_sum.add_(error)
            slices = node_sum.view(self._nodes, -1)
            self._operations.quantize(slices, messages, quant_format)
            if error is not None:
                decoded = torch.empty_like(slices)
                self._operations.dequantize(messages, decoded, quant_format)
                lost = (slices - decoded).flatten()
                # what is not finite is not fed back, and skips the step
                error.copy_(lost.where(lost.isfinite(), 0.0))

        return self._send(fill, total, False)

    def _send(self, fill: Callable[[Tensor], None], total: Tensor, add: bool) -> Pending:
        """Hop 2 of the messages that `fill` writes."""
        quant_format = self._first.format

        def take(received: Tensor) -> None:
            messages = received.view(self._nodes, -1)
            self._operations.sum_into(messages, total, quant_format, add=add)

        return self._hops.submit(self._nodes * quant_format.message_bytes(len(total)), fill, take)
