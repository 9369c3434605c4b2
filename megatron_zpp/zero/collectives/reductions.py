"""Reductions of gradients as they are, one class for each algorithm. Every sum is in fp32."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending, copy
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.exchange import build_exchange
from megatron_zpp.zero.collectives.sums import sum_parts
from megatron_zpp.zero.collectives.two_hops import TwoHops
from megatron_zpp.zero.grad_segments import GradSegment, join
from megatron_zpp.zero.reduction_plan import ReductionPlan


class LibraryAllReduce:
    """The all-reduce of NCCL or gloo, which sums in the plan's `gradient_dtype`, between nodes at stage 0."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[CommStream], operations: Operations | None
    ) -> None:
        (self._comm_stream,) = comm_streams
        joined = plan.buffers.joined
        self._joined = self._comm_stream.zeros(*joined) if joined.numel else None

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
        assert not add
        assert squares is None

        def work() -> None:
            full = total if self._joined is None else self._joined[: len(total)]
            self._comm_stream.all_reduce(join(sent, full))
            copy(total, full)

        return self._comm_stream.submit(work)


class LocalSumAllReduce:
    """Every rank receives all gradients and sums them itself."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[CommStream], operations: Operations | None
    ) -> None:
        (self._comm_stream,) = comm_streams
        joined = self._comm_stream.zeros(*plan.buffers.joined)
        self._exchange = build_exchange(plan, self._comm_stream, operations, joined, whole=True)

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
        assert not add
        return self._comm_stream.submit(lambda: self._exchange.sum(sent, total, add=False, squares=squares))


class TwoStepAllReduce:
    """A reduce-scatter, and a gather of sums rounded once to `gradient_dtype`: copy engines can do both."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[CommStream], operations: Operations | None
    ) -> None:
        (self._comm_stream,) = comm_streams
        self._sums = self._comm_stream.zeros(*plan.buffers.joined)
        self._exchange = build_exchange(plan, self._comm_stream, operations, self._sums)

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
        assert not add
        assert squares is None
        ranks, group_rank = len(self._comm_stream.ranks), self._comm_stream.group_rank

        def work() -> None:
            full = self._sums[: len(total)]
            mine, own = (flat.view(ranks, -1)[group_rank] for flat in (total, full))
            exact = own if own.dtype == torch.float32 else mine
            self._exchange.sum(sent, exact, add=False)
            copy(own, exact)
            self._comm_stream.all_gather(full, own)
            copy(total, full)

        return self._comm_stream.submit(work)


class OneHopReduceScatter:
    """One exchange over all ranks: each sums its own shard."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[CommStream], operations: Operations | None
    ) -> None:
        (self._comm_stream,) = comm_streams
        joined = self._comm_stream.zeros(*plan.buffers.joined)
        self._exchange = build_exchange(plan, self._comm_stream, operations, joined)

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
        return self._comm_stream.submit(lambda: self._exchange.sum(sent, total, add=add, squares=squares))


class TwoHopReduceScatter:
    """Sums gradients inside each node first, so that each link between nodes has them once.

    Hop 1: a rank gets from each rank of its node the gradients that its cross-node ranks own, and sums them
    in the order of the ranks. The gradient is in the order of its owners, so what one node owns is
    contiguous, and hop 1 is an all-to-all for each node. Hop 2: the sums travel to their owners, which add
    those of the nodes in the order of the nodes. Rounding of the sums between nodes is not fed back.
    """

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[CommStream], operations: Operations | None
    ) -> None:
        self._inside, between = comm_streams
        self._operations, buffers = operations, plan.buffers
        self._local, self._nodes = len(self._inside.ranks), len(between.ranks)
        self._joined = self._inside.zeros(*buffers.joined)
        self._received = self._inside.zeros(*buffers.received)
        self._exact = self._inside.zeros(*buffers.exact) if buffers.exact.numel else None
        self._hops = TwoHops(self._inside, between, buffers)

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

        def fill(sums: Tensor) -> None:
            full = join(sent, self._joined.view(sent[0].flat.dtype))
            for row, node_sum in zip(full.view(self._nodes, -1), sums.view(self._nodes, -1), strict=True):
                received = self._received.view(row.dtype)[: len(row)]
                self._inside.all_to_all(received, row)
                exact = node_sum if self._exact is None else self._exact[: len(total)]
                sum_parts(self._operations, received.view(self._local, -1), exact, add=False)
                copy(node_sum, exact)

        def take(received: Tensor) -> None:
            sum_parts(self._operations, received.view(self._nodes, -1), total, add=add, squares=squares)

        return self._hops.submit(self._nodes * len(total), fill, take)
