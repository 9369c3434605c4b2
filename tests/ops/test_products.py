"""Products by a named algorithm on CPUs, against torch's, and the messages of invalid arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.ops import products
from megatron_zpp.ops.products import CPU_ALGORITHM, algorithms, cublaslt_version, multiply

LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]


def factors(m: int, n: int, k: int, left_transposed: bool, right_transposed: bool) -> tuple[Tensor, Tensor]:
    left = torch.randn(*((k, m) if left_transposed else (m, k)), dtype=torch.float64)
    right = torch.randn(*((n, k) if right_transposed else (k, n)), dtype=torch.float64)
    return left, right


@pytest.mark.parametrize(("of_left", "of_right"), LAYOUTS)
@pytest.mark.parametrize("sizes", [(3, 5, 7), (1, 1, 1), (0, 4, 2), (4, 0, 2), (2, 3, 0)])
def test_a_product_is_the_sum_over_k(
    kernels: None, sizes: tuple[int, int, int], of_left: bool, of_right: bool
) -> None:
    left, right = factors(*sizes, of_left, of_right)
    bias = torch.randn(sizes[1], dtype=torch.float64)
    a, b = left.T if of_left else left, right.T if of_right else right
    expected = (a[:, :, None] * b[None]).sum(1)
    for given, wanted in ((None, expected), (bias, expected + bias)):
        out = multiply(left, right, given, CPU_ALGORITHM, left_transposed=of_left, right_transposed=of_right)
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


def test_rows_may_have_any_stride(kernels: None) -> None:
    left, right = torch.randn(4, 10)[:, :6], torch.randn(6, 12)[:, 3:8]
    out = multiply(left, right, None, CPU_ALGORITHM)
    torch.testing.assert_close(out, left @ right)


def test_a_cpu_has_one_algorithm_and_no_cublaslt(kernels: None) -> None:
    assert algorithms(torch.zeros(2, 3), torch.zeros(3, 4), None) == [CPU_ALGORITHM]
    assert cublaslt_version() == 0 or torch.version.cuda is not None


def test_torch_may_trace_and_compile_it(kernels: None) -> None:
    left, right = factors(4, 6, 8, True, True)
    arguments = left, right, torch.randn(6, dtype=torch.float64), True, True, CPU_ALGORITHM
    torch.library.opcheck(torch.ops.megatron_zpp.product.default, arguments)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"left": torch.zeros(3)}, "product: left must be a matrix of contiguous rows"),
    ({"left": torch.zeros(3, 2).T}, "product: left must be a matrix of contiguous rows"),
    ({"right": torch.zeros(3, 4).double()}, "product: right must be"),
    ({"right": torch.zeros(4, 4)}, "product: right must have as many terms per sum as left, 3, got 4"),
    ({"bias": torch.zeros(5)}, "product: bias must be"),
    ({"algorithm": "0" * 144}, "product: algorithm must be 'torch' on CPUs"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSALS)
def test_invalid_arguments_are_named(kernels: None, changed: dict[str, Any], message: str) -> None:
    valid = {"left": torch.zeros(2, 3), "right": torch.zeros(3, 4), "bias": None, "algorithm": CPU_ALGORITHM}
    with pytest.raises(ValueError, match=message):
        products.multiply(**valid | changed)
