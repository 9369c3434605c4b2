"""Sums of gradients and of their squares on one rank, by the project's kernels or by torch's."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.formats import SQUARES_BLOCK
from megatron_zpp.ops.operations import Operations


def sum_parts(
    operations: Operations | None,
    parts: Tensor,
    total: Tensor,
    *,
    add: bool,
    own: Tensor | None = None,
    group_rank: int = 0,
    squares: Tensor | None = None,
) -> None:
    """Sum `parts` (P, n) in order; overwrite the fp32 `total` (n,), or `add` to it.

    `own` (n,) replaces part `group_rank`. Without `operations` every part is a pass over memory.
    """
    if operations is not None:
        operations.sum_parts(parts, total, add=add, own=own, group_rank=group_rank, squares=squares)
        return
    if own is not None and own.data_ptr() == total.data_ptr():
        own = own.clone()
    for index, row in enumerate(parts):
        part = own if own is not None and index == group_rank else row
        total.add_(part) if add or index else total.copy_(part)
    if squares is not None:
        sum_squares(None, total, squares)


def sum_squares(operations: Operations | None, flat: Tensor, sums: Tensor) -> None:
    """Write the sum of the squares of each block of `flat` (n,) to `sums` (n / SQUARES_BLOCK,) fp32."""
    if operations is not None:
        operations.sum_squares(flat, sums)
        return
    norms = torch.linalg.vector_norm(flat.view(-1, SQUARES_BLOCK), dim=1, dtype=torch.float32)
    torch.square(norms, out=sums)


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
