"""Linear maps whose three products may each have an algorithm of their own, chosen for one number of rows.

Shapes: R rows, K inputs, N outputs. A map computes x (R, K) @ weight (N, K)ᵀ + bias in the forward; in the
backward gradient (R, N) @ weight and gradientᵀ @ x.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class ProductShape:
    """What the choice of an algorithm depends on: (m, k) @ (k, n), each factor perhaps stored transposed."""

    dtype: torch.dtype
    m: int
    n: int
    k: int
    left_transposed: bool
    right_transposed: bool
    bias: bool

    @property
    def name(self) -> str:
        """Text that differs between shapes, as in bfloat16_16384x6144x2048_nt_bias: m, n, k."""
        layout = "nt"[self.left_transposed] + "nt"[self.right_transposed]
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}_{self.m}x{self.n}x{self.k}_{layout}{'_bias' * self.bias}"

    @property
    def transposed(self) -> dict[str, bool]:
        """The arguments of a product that say which factors are stored transposed."""
        return {"left_transposed": self.left_transposed, "right_transposed": self.right_transposed}


@dataclass(frozen=True)
class LinearAlgorithms:
    """The algorithms of a map's products for inputs of `rows` rows; an empty one is torch's own product."""

    rows: int
    forward: str = ""
    of_input: str = ""
    of_weight: str = ""

    @property
    def any(self) -> bool:
        """Whether a product is not torch's own."""
        return bool(self.forward or self.of_input or self.of_weight)


class NamedProduct(Protocol):
    """A product by an algorithm that is named; see ops/products.py, `multiply`."""

    def __call__(
        self,
        left: Tensor,
        right: Tensor,
        bias: Tensor | None,
        algorithm: str,
        *,
        left_transposed: bool = False,
        right_transposed: bool = False,
    ) -> Tensor:
        """Return left @ right + bias."""


def own_product(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    *,
    left_transposed: bool = False,
    right_transposed: bool = False,
) -> Tensor:
    """Return left @ right + bias, by torch."""
    left, right = left.t() if left_transposed else left, right.t() if right_transposed else right
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


class ChosenLinear(nn.Linear):
    """nn.Linear, with chosen algorithms for inputs of one number of rows, and torch's products for others."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, *, multiply: NamedProduct) -> None:
        """`multiply` computes the products that have an algorithm, once `algorithms` are set."""
        super().__init__(inputs, outputs, bias)
        self.multiply, self.algorithms = multiply, LinearAlgorithms(0)

    def forward(self, input: Tensor) -> Tensor:
        """(…, K) -> (…, N)."""
        return self.affine(input, self.bias)

    def affine(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear(x, self.weight, bias)."""
        chosen = self.algorithms
        if not chosen.any or x.numel() != chosen.rows * self.in_features:
            return F.linear(x, self.weight, bias)
        names = chosen.forward, chosen.of_input, chosen.of_weight
        rows = _Linear.apply(x.flatten(0, -2), self.weight, bias, *names, self.multiply)
        return rows.unflatten(0, x.shape[:-1])

    def product_shapes(self, rows: int, dtype: torch.dtype) -> dict[str, ProductShape]:
        """The shapes of the three products, by their names in LinearAlgorithms."""
        inputs, outputs = self.in_features, self.out_features
        return {
            "forward": ProductShape(dtype, rows, outputs, inputs, False, True, self.bias is not None),
            "of_input": ProductShape(dtype, rows, inputs, outputs, False, False, False),
            "of_weight": ProductShape(dtype, outputs, inputs, rows, True, False, False),
        }


def affine(linear: nn.Linear, x: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear(x, linear.weight, bias), by the algorithms of `linear` if it has any."""
    return linear.affine(x, bias) if isinstance(linear, ChosenLinear) else F.linear(x, linear.weight, bias)


def chosen_linears(model: nn.Module) -> Iterator[tuple[str, ChosenLinear]]:
    """The maps of a model that can have chosen algorithms, by name."""
    return ((name, each) for name, each in model.named_modules() if isinstance(each, ChosenLinear))


class _Linear(torch.autograd.Function):
    """F.linear of rows (R, K), by algorithms that are named."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        forward: str,
        of_input: str,
        of_weight: str,
        multiply: NamedProduct,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.algorithms, ctx.multiply = (of_input, of_weight), multiply
        if not forward:
            return own_product(rows, weight, bias, right_transposed=True)
        return multiply(rows.contiguous(), weight, bias, forward, right_transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_input, of_weight = ctx.algorithms
        of_rows = of_weights = of_bias = None
        if ctx.needs_input_grad[0]:
            if of_input:
                of_rows = ctx.multiply(gradient.contiguous(), weight, None, of_input)
            else:
                of_rows = own_product(gradient, weight, None)
        if ctx.needs_input_grad[1]:
            if of_weight:
                factors = gradient.contiguous(), rows.contiguous()
                of_weights = ctx.multiply(*factors, None, of_weight, left_transposed=True)
            else:
                of_weights = own_product(gradient, rows, None, left_transposed=True)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0)
        return of_rows, of_weights, of_bias, None, None, None, None
