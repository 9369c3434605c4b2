"""Products of matrices by an algorithm that the caller names: the operators of csrc/product_bindings.cpp.

A factor is a matrix of contiguous rows, of which the transpose may be meant. The result is (m, n), in the
dtype of the factors: bf16 or fp16 on GPUs, with sums in fp32, anything that torch multiplies on CPUs. An
algorithm is a string that `algorithms` returned: it computes the same bits whenever it computes the same
product by the same version of cuBLASLt on the same kind of GPU. CPUs have one, CPU_ALGORITHM.
"""

import torch
from torch import Tensor

CPU_ALGORITHM = "torch"
ALIGNMENT = 8  # elements: what every size of a product on a GPU, and the address of every factor, divides by


def multiply(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    algorithm: str,
    *,
    left_transposed: bool = False,
    right_transposed: bool = False,
) -> Tensor:
    """Return left @ right + bias (n).

    `algorithm` is one that `algorithms` returned for such a product on such a device: cuBLASLt refuses some
    others (ValueError), and fails without a message for what it never named.
    """
    return torch.ops.megatron_zpp.product(left, right, bias, left_transposed, right_transposed, algorithm)


def algorithms(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    *,
    left_transposed: bool = False,
    right_transposed: bool = False,
    most: int = 8,
) -> list[str]:
    """Return the algorithms that cuBLASLt's heuristics name for a product, the most promising first."""
    return torch.ops.megatron_zpp.product_algorithms(
        left, right, bias, left_transposed, right_transposed, most
    )


def cublaslt_version() -> int:
    """Return the version of cuBLASLt that `multiply` uses, such as 130100; 0 if the kernels lack it."""
    return torch.ops.megatron_zpp.cublaslt_version()


def register_fakes() -> None:
    """Let torch.compile and FakeTensorMode trace `multiply`; once per process, after the library's load."""

    @torch.library.register_fake("megatron_zpp::product")
    def fake(
        left: Tensor,
        right: Tensor,
        bias: Tensor | None,
        left_transposed: bool,
        right_transposed: bool,
        algorithm: str,
    ) -> Tensor:
        m, k = reversed(left.shape) if left_transposed else left.shape
        terms, n = reversed(right.shape) if right_transposed else right.shape
        torch._check(k == terms, lambda: f"product: right must have as many terms per sum as left, {k}")
        return left.new_empty(m, n)
