"""Reductions of gradients as they are, one class for each algorithm. Every sum is in fp32."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending, copy
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.exchange import build_exchange
from megatron_zpp.zero.collectives.first_hop import Fold, PlainFirstHop
from megatron_zpp.zero.collectives.interface import Target
from megatron_zpp.zero.collectives.sums import sum_parts
from megatron_zpp.zero.collectives.two_hops import TwoHops
from megatron_zpp.zero.grad_segments import GradSegment, join
from megatron_zpp.zero.reduction_plan import ReductionPlan


class LibraryAllReduce:
    """The all-reduce of NCCL or gloo, which sums in the plan's `gradient_dtype`, between nodes at stage 0."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[Sequence[CommStream]], operations: Operations | None
    ) -> None:
        ((self._comm_stream,),) = comm_streams
        joined = plan.buffers.joined
        self._joined = self._comm_stream.zeros(*joined) if joined.numel else None

    def reduce(self, sent: Sequence[GradSegment], target: Target) -> Pending:
        """See Reduction."""
        assert not target.add
        assert target.squares is None
        total = target.total

        def work() -> None:
            full = total if self._joined is None else self._joined[: len(total)]
            self._comm_stream.all_reduce(join(sent, full))
            copy(total, full)

        return self._comm_stream.submit(work)


class LocalSumAllReduce:
    """Every rank receives all gradients and sums them itself."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[Sequence[CommStream]], operations: Operations | None
    ) -> None:
        ((self._comm_stream,),) = comm_streams
        joined = self._comm_stream.zeros(*plan.buffers.joined)
        self._exchange = build_exchange(plan, self._comm_stream, operations, joined, whole=True)

    def reduce(self, sent: Sequence[GradSegment], target: Target) -> Pending:
        """See Reduction."""
        assert not target.add
        return self._comm_stream.submit(lambda: self._exchange.sum(sent, target))


class TwoStepAllReduce:
    """A reduce-scatter, and a gather of sums rounded once to `gradient_dtype`: copy engines can do both."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[Sequence[CommStream]], operations: Operations | None
    ) -> None:
        ((self._comm_stream,),) = comm_streams
        self._sums = self._comm_stream.zeros(*plan.buffers.joined)
        self._exchange = build_exchange(plan, self._comm_stream, operations, self._sums)

    def reduce(self, sent: Sequence[GradSegment], target: Target) -> Pending:
        """See Reduction."""
        assert not target.add
        assert target.squares is None
        total = target.total
        ranks, group_rank = len(self._comm_stream.ranks), self._comm_stream.group_rank

        def work() -> None:
            full = self._sums[: len(total)]
            mine, own = (flat.view(ranks, -1)[group_rank] for flat in (total, full))
            exact = own if own.dtype == torch.float32 else mine
            self._exchange.sum(sent, Target(exact))
            copy(own, exact)
            self._comm_stream.all_gather(full, own)
            copy(total, full)

        return self._comm_stream.submit(work)


class OneHopReduceScatter:
    """One exchange over all ranks: each sums its own shard."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[Sequence[CommStream]], operations: Operations | None
    ) -> None:
        ((self._comm_stream,),) = comm_streams
        joined = self._comm_stream.zeros(*plan.buffers.joined)
        self._exchange = build_exchange(plan, self._comm_stream, operations, joined)

    def reduce(self, sent: Sequence[GradSegment], target: Target) -> Pending:
        """See Reduction."""
        return self._comm_stream.submit(lambda: self._exchange.sum(sent, target))


class TwoHopReduceScatter:
    """Sums gradients inside each node first, so that each link between nodes has them once.

    Hop 1: a rank sums the gradients that its cross-node ranks own (`FirstHop`), and the fold, if there is
    one, adds the sums of the node's groups. Hop 2: the sums travel to their owners, which add those of the
    nodes in the order of the nodes. Rounding of the sums between nodes is not fed back.
    """

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[Sequence[CommStream]], operations: Operations | None
    ) -> None:
        (inside,), between, *fold = comm_streams
        self._operations, buffers = operations, plan.buffers
        self._nodes = plan.nodes
        self._inside, self._first = inside, PlainFirstHop(plan, inside, operations)
        self._fold = Fold(plan, fold[0][0], operations) if fold else None
        self._exact = inside.zeros(*buffers.exact) if buffers.exact.numel else None
        self._hops = TwoHops(inside, between, buffers)

    def reduce(self, sent: Sequence[GradSegment], target: Target) -> Pending:
        """See Reduction."""
        assert self._fold is None

        def fill(sums: Tensor) -> None:
            exact = sums if self._exact is None else self._exact[: len(sums)]
            self._first.sum_now(sent, exact, add=False)
            copy(sums, exact)

        return self._send(fill, target)

    def accumulate(self, sent: Sequence[GradSegment], accumulated: Tensor, *, add: bool) -> Pending:
        """See GroupReduction."""
        return self._first.sum(sent, accumulated, add=add)

    def reduce_accumulated(self, accumulated: Tensor, target: Target) -> Pending:
        """See GroupReduction."""

        def fill(sums: Tensor) -> None:
            node_sum = accumulated
            if self._fold is not None:
                assert self._exact is not None
                node_sum = self._exact[: len(sums)]
                self._fold.sum_now(accumulated, Target(node_sum))
            sums.copy_(node_sum)

        return self._send(fill, target)

    def _send(self, fill: Callable[[Tensor], None], target: Target) -> Pending:
        """Hop 2 of the node's sums that `fill` writes."""
        total, add, squares, _ = target

        def take(received: Tensor) -> None:
            sum_parts(self._operations, received.view(self._nodes, -1), total, add=add, squares=squares)

        return self._hops.submit(self._nodes * len(total), fill, take)
