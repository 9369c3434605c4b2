"""Products x · xᵀ of matrices: half of the tiles are computed, the others are their mirror images.

Shapes: N matrices x (S, K). Tiles come by the tensor memory accelerator, which GPUs of compute capability 9.0
and later have.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_TILE, _DEPTH, _WARPS, _STAGES = 128, 64, 8, 4
_LEAST = 2048  # rows of x below which torch's whole product is as fast


def serves(x: Tensor) -> bool:
    """Return whether `squared` takes the product of matrices (N, R, C), or of their transposes, and pays."""
    whole = all(side % _DEPTH == 0 for side in x.shape[1:])
    hopper = torch.cuda.get_device_capability(x.device) >= (9, 0)
    return x.dtype == torch.bfloat16 and whole and min(x.shape[1:]) >= _LEAST and hopper


def squared(x: Tensor, of_product: float = 1.0, of_x: float = 0.0) -> Tensor:
    """of_product · x · xᵀ + of_x · x: (N, S, K) -> (N, S, S); x is symmetric unless `of_x` is 0.

    x is contiguous, or a transpose of such a tensor; its sides are multiples of 64.
    """
    number, side, depth = x.shape
    turned = not x.is_contiguous()
    stored = x.mT if turned else x
    assert stored.is_contiguous()
    rows = stored.view(-1, stored.shape[-1])
    tile = [_DEPTH, _TILE] if turned else [_TILE, _DEPTH]
    out = x.new_empty(number, side, side)
    tiles = triton.cdiv(side, _TILE)
    _squared_kernel[(tiles, tiles, number)](
        *(TensorDescriptor.from_tensor(rows, tile), x, out, side, depth, of_product, of_x),
        ADDS=of_x != 0,
        TURNED=turned,
        TILE=_TILE,
        DEPTH=_DEPTH,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out


@triton.jit
def _squared_kernel(
    tiles,  # of x, (N · S, K); turned, (N · K, S)
    x_ptr,  # (N, S, S) where it is added
    out_ptr,  # (N, S, S)
    side,
    depth,
    of_product,
    of_x,
    ADDS: tl.constexpr,
    TURNED: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    column, row, number = tl.program_id(0) * TILE, tl.program_id(1) * TILE, tl.program_id(2)
    if column > row:
        return
    total = tl.zeros([TILE, TILE], tl.float32)
    for done in range(0, depth, DEPTH):
        if TURNED:
            left = tiles.load([number * depth + done, row]).T
            right = tiles.load([number * depth + done, column])
        else:
            left = tiles.load([number * side + row, done])
            right = tiles.load([number * side + column, done]).T
        total = tl.dot(left, right, total)
    total *= of_product
    rows, columns = row + tl.arange(0, TILE), column + tl.arange(0, TILE)
    first = number.to(tl.int64) * side * side
    at = rows[:, None] * side + columns[None, :]
    inside = (rows < side)[:, None] & (columns < side)[None, :]
    if ADDS:
        total += of_x * tl.load(x_ptr + first + at, mask=inside, other=0.0).to(tl.float32)
    product = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + first + at, product, mask=inside)
    if column < row:
        mirrored = columns[:, None] * side + rows[None, :]
        there = (columns < side)[:, None] & (rows < side)[None, :]
        tl.store(out_ptr + first + mirrored, product.T, mask=there)
