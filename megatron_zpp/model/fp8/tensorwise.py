"""Linear layers whose matrix products take 8-bit floats, scaled a tensor at a time as each is made.

Weights and activations are E4M3, gradients E5M2, with fp32 sums ("FP8 Formats for Deep Learning",
arXiv 2209.05433, sections 3 and 4). A tensor is multiplied by 448 (E4M3) or 57344 (E5M2) over its largest
magnitude, so that this one is exact and nothing overflows; a NaN or Inf in it makes the whole product NaN.
Parameters stay in the compute dtype.
"""

import torch
from torch import Tensor, nn

from megatron_zpp.model.fp8.delayed import CodedProduct, plain_transpose


class Float8Linear(nn.Linear):
    """nn.Linear with products of 8-bit floats; widths are multiples of 16.

    So is the number of rows where there are gradients, since the weights' are a product over them.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of the input: fp32 or a 16-bit one."""
        rows = float8_linear(input.flatten(0, -2), self.weight, self.bias)
        return rows.unflatten(0, input.shape[:-1])


def float8_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of rows (R, in) and a weight (out, in), whose product is of 8-bit floats; see Float8Linear."""
    nothing_known = (None,) * 5  # neither scales nor a cast that takes any
    return CodedProduct.apply(
        *(rows, None, None, weight, bias), *nothing_known, plain_transpose, torch.is_grad_enabled()
    )
