"""How the matrix products of a model are computed: in the compute format, or in 8 bits by model/fp8/."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of rows (R, K), a weight (N, K) and a bias (N)


class Matmuls:
    """Products in the compute format, by torch."""

    linear: Callable[..., nn.Linear] = nn.Linear
    output: Callable[[], Any] | None = None  # makes the product of the loss; None: torch's

    def product(self) -> Product:
        """What computes one linear map where tensor ranks share the model."""
        return F.linear

    def scaling(self, model: nn.Module) -> Any:
        """The scales of all products of `model`, a ProductScaling of zero/; None without."""
        return None

    def weight_codes(self, scaling: Any) -> Any:
        """What encodes the weights that are held as codes, a WeightEncoder of zero/; None without."""
        return None

    def fuse(self, model: Any) -> Any:
        """Give Triton kernels to the layers of `model`, a GPT; return those of its loss."""
        from megatron_zpp.model.fused import blocks, loss  # import Triton, which comes with torch for GPUs

        blocks.fuse(model)
        return loss.PASSES


PLAIN_MATMULS = Matmuls()
