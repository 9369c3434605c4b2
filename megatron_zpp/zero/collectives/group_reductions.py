"""The reduction of a node whose ranks accumulate gradients in several groups."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending, all_of, owning
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.first_hop import Fold, build_first_hop
from megatron_zpp.zero.collectives.rotation import Rotation
from megatron_zpp.zero.grad_segments import GradSegment
from megatron_zpp.zero.reduction_plan import ReductionPlan


class FoldedReduceScatter:
    """One node: the groups sum after every micro-batch, and the fold adds their sums once per step."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[Sequence[CommStream]], operations: Operations | None
    ) -> None:
        (group,), (between_groups,) = comm_streams
        self._group, self._groups = group, plan.groups
        self._first = build_first_hop(plan, group, operations)
        self._fold = Fold(plan, between_groups, operations)

    def reduce(
        self,
        sent: Sequence[GradSegment],
        total: Tensor,
        *,
        add: bool,
        squares: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Pending:
        """See Reduction."""
        assert not add
        accumulated = torch.empty(self._groups * len(total), device=total.device)
        summed = self.accumulate(sent, accumulated, add=False)
        reduced = self.reduce_accumulated(accumulated, total, squares=squares)
        return owning(accumulated, all_of([summed, reduced]))

    def accumulate(self, sent: Sequence[GradSegment], accumulated: Tensor, *, add: bool) -> Pending:
        """See GroupReduction."""
        return self._first.sum(sent, accumulated, add=add)

    def reduce_accumulated(
        self,
        accumulated: Tensor,
        total: Tensor,
        *,
        squares: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Pending:
        """See GroupReduction."""
        return self._group.submit(lambda: self._fold.sum_now(accumulated, total, squares=squares))
