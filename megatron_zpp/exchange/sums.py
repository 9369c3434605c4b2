"""Sums of gradients and of their squares by torch, and sums of small numbers over ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.formats import SQUARES_BLOCK
from megatron_zpp.ops.operations import Operations


class _TorchSums:
    """Operators of which each part is a pass over memory."""

    @staticmethod
    def sum_parts(
        parts: Tensor, total: Tensor, add: bool, own: Tensor | None, group_rank: int, squares: Tensor | None
    ) -> None:
        if own is not None and own.data_ptr() == total.data_ptr():
            own = own.clone()
        for index, row in enumerate(parts):
            part = own if own is not None and index == group_rank else row
            total.add_(part) if add or index else total.copy_(part)
        if squares is not None:
            _TorchSums.sum_squares(total, squares)

    @staticmethod
    def sum_squares(flat: Tensor, sums: Tensor) -> None:
        norms = torch.linalg.vector_norm(flat.view(-1, SQUARES_BLOCK), dim=1, dtype=torch.float32)
        torch.square(norms, out=sums)


TORCH_SUMS = Operations(_TorchSums, compiled=False)  # sums alone, where a run has no operations


def sum_over_ranks(value: Tensor, mesh: Mesh) -> Tensor:
    """The sum of one small tensor over all ranks of the job; a NaN on one rank is a NaN on all."""
    if mesh.world_size > 1:
        value = value.clone()
        dist.all_reduce(value)  # SUM: gloo's MAX and MIN would lose a NaN
    return value


def largest_over_ranks(maxima: Tensor, mesh: Mesh) -> Tensor:
    """The largest of finite numbers over all ranks of the job, in place."""
    if mesh.world_size > 1:
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return maxima
