"""Newton-Schulz iteration: a matrix with the singular vectors of another, and singular values of about 1.

The odd polynomials a·x + b·x³ + c·x⁵ push all singular values towards 1. Coefficients by the names of
NVIDIA's Emerging-Optimizers, which Megatron-LM's --muon-coefficient-type has:

    simple          Keller Jordan's, https://kellerjordan.github.io/posts/muon/
    quintic         of modded-nanogpt, for five steps
    polar_express   2505.16932, for any steps; after eight the last repeats
    aol             of flash-newton-schulz (Turbo-Muon), for four steps, of 1 / 1.2 of a matrix

The norm of a matrix of rank one is its singular value. NVIDIA's aol makes a 1 a -1, so that such matrices,
and those of one row or column, move along their gradients, not against them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]
_EPSILON = 1e-7  # of the norm of a matrix of zeros

COEFFICIENTS: dict[str, Coefficients] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "aol": (
        (4.0098 / 1.2, -7.0585 / 1.2**3, 2.4635 / 1.2**5),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}


def coefficients(name: str, steps: int) -> Coefficients:
    """Those of so many steps, which config/optimizer.py has checked."""
    given = COEFFICIENTS[name]
    if name == "polar_express":
        return (*given[:steps], *[given[-1]] * (steps - len(given)))
    assert steps % len(given) == 0, f"{steps} steps of {name}"
    return given * (steps // len(given))


def flops(rows: int, columns: int, steps: int) -> int:
    """Floating-point operations of so many steps on a matrix."""
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)


def working_numel(matrices: Tensor) -> int:
    """Elements that `orthogonalize_` allocates: matrices before and after a step, and two symmetric ones."""
    return 2 * matrices.numel() + 2 * len(matrices) * min(matrices.shape[1:]) ** 2


def orthogonalize_(matrices: Tensor, given: Coefficients) -> None:
    """Change matrices (n, rows, columns) in any float format, in which the products are too."""
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = matrices * norms.clamp_min(_EPSILON).reciprocal().to(matrices.dtype)
    product = _squared_of(x)
    for step, of_step in enumerate(given, 1):
        x = _stepped(x, product, of_step, matrices if step == len(given) else None)


def _stepped(
    x: Tensor, product: Callable[..., Tensor], of_step: tuple[float, float, float], out: Tensor | None
) -> Tensor:
    """One step of matrices; a function, so that the symmetric ones are free before the next step's."""
    a, b, c = of_step
    tall = x.shape[1] > x.shape[2]
    gram = product(x.mT if tall else x)
    polynomial = product(gram, c, b)
    pair = (x, polynomial) if tall else (polynomial, x)
    return torch.baddbmm(x, *pair, beta=a, out=out)


def squared(x: Tensor, of_product: float = 1.0, of_x: float = 0.0) -> Tensor:
    """of_product · x · xᵀ + of_x · x: (n, s, k) -> (n, s, s); x is symmetric unless `of_x` is 0."""
    return torch.baddbmm(x, x, x.mT, beta=of_x, alpha=of_product) if of_x else (x @ x.mT).mul_(of_product)


def _squared_of(x: Tensor) -> Callable[..., Tensor]:
    """The kernel that computes half of a symmetric product where it is faster, else `squared`."""
    if x.is_cuda:
        from megatron_zpp.zero.fused import symmetric

        if symmetric.serves(x):
            return symmetric.squared
    return squared
