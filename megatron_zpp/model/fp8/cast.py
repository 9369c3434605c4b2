"""The cast to 8-bit floats of delayed scaling: codes in one or both layouts, and the largest magnitude.

Shapes: R rows, W columns. What a product needs of a tensor is three numbers per kind (input, weight,
gradient), kept in two tensors: `factors` (2, 3, 4) fp32, by which a tensor is multiplied before it is rounded
to codes and by which codes are multiplied to get it back, each four times, since cuBLASLt takes only scales
that are aligned to 16 bytes; and `maxima` (3,) fp32, the largest finite magnitudes since they were last set
to zero.

Casts saturate: what the scale of earlier steps does not reach becomes the largest code. A NaN or Inf becomes
a NaN, so that the step is not finite, as in bf16; it does not count for the maxima, so that later scales are
sound.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Cast: TypeAlias = Callable[..., tuple[Tensor, Tensor]]  # what `plain_cast` computes, perhaps by a kernel
INPUT, WEIGHT, GRADIENT = range(3)
FORMATS = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)  # by kind
LARGEST = tuple(torch.finfo(format).max for format in FORMATS)  # codes
SMALLEST = 1e-12  # of a tensor's largest magnitude, or the scale of zeros would be infinite


def plain_cast(
    x: Tensor, factors: Tensor, maxima: Tensor, kind: int, *, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """Return the codes of x (R, W) row by row (R, W) and column by column (W, R); `maxima[kind]` grows.

    A layout that is not asked for is a tensor without elements.
    """
    wide = x.float()
    maxima[kind] = torch.maximum(maxima[kind], largest_finite(wide))
    scaled = (wide * factors[0, kind, 0]).clamp(-LARGEST[kind], LARGEST[kind])
    return _laid_out(torch.where(wide.isfinite(), scaled, torch.nan).to(FORMATS[kind]), rows, columns)


def present_cast(x: Tensor, kind: int, *, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same codes by the scale of x itself, and the fp32 scalar () that gives x back.

    The largest magnitude is exact. A NaN or Inf makes all of them NaN.
    """
    scale = x.abs().amax().float().clamp(min=SMALLEST) / LARGEST[kind]
    scaled = (x.float() / scale).clamp(-LARGEST[kind], LARGEST[kind])  # rounding may lead above the largest
    return *_laid_out(scaled.to(FORMATS[kind]), rows, columns), scale


def _laid_out(codes: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Codes row by row and column by column, where they are wanted."""
    none = codes.new_empty(0)
    return codes if rows else none, codes.t().contiguous() if columns else none


def largest_finite(x: Tensor) -> Tensor:
    """The largest finite magnitude of x, () fp32."""
    size = x.abs().float()
    return torch.where(size < torch.inf, size, 0.0).amax()  # NaN is not less


def scale_of(largest: Tensor, kind: int) -> Tensor:
    """The scales of tensors with these largest magnitudes."""
    # Not a number over a tensor, which torch rounds twice: scales of earlier steps are rounded once.
    return torch.full_like(largest, LARGEST[kind]) / largest.clamp(min=SMALLEST)


def factors_of(scales: Tensor) -> Tensor:
    """The `factors` (…, 2, 3, 4) of scales (…, 3)."""
    return (
        torch.stack((scales, scales.reciprocal()), -2)[..., None]
        .expand(*scales.shape[:-1], 2, 3, 4)
        .contiguous()
    )


def back(factors: Tensor, kind: int) -> Tensor:
    """The number (1) that codes of a kind are multiplied by."""
    return factors[1, kind, :1]  # torch.compile of torch 2.11 fails for a scalar () that is a view
