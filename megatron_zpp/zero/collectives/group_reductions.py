"""The reduction of a node whose ranks accumulate gradients in several groups."""

from collections.abc import Sequence

from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.first_hop import Fold, PlainFirstHop, QuantizedFirstHop
from megatron_zpp.zero.collectives.interface import Target
from megatron_zpp.zero.grad_segments import GradSegment
from megatron_zpp.zero.reduction_plan import ReductionPlan


class FoldedReduceScatter:
    """One node: the groups sum after every micro-batch, and the fold adds their sums once per step."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[Sequence[CommStream]], operations: Operations | None
    ) -> None:
        (group,), (between_groups,) = comm_streams
        self._group = group
        self._first: PlainFirstHop | QuantizedFirstHop
        if plan.quantized:
            assert operations is not None
            self._first = QuantizedFirstHop(plan, group, operations)
        else:
            self._first = PlainFirstHop(plan, group, operations)
        self._fold = Fold(plan, between_groups, operations)

    def accumulate(self, sent: Sequence[GradSegment], accumulated: Tensor, *, add: bool) -> Pending:
        """See GroupReduction."""
        return self._first.sum(sent, accumulated, add=add)

    def reduce_accumulated(self, accumulated: Tensor, target: Target) -> Pending:
        """See GroupReduction."""
        return self._group.submit(lambda: self._fold.sum_now(accumulated, target))
